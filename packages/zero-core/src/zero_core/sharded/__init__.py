"""Sharded state of an engine: memory of units, offloaded parameters, edits, snapshots."""

MASTER = "master_weight"
"""Name of the master weights, in ``engine.states`` and in checkpoints."""
