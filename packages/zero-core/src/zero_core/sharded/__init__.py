"""Sharded state of an engine: memory of units, offloaded parameters, edits, snapshots."""
