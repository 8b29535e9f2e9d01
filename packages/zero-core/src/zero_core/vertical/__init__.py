"""Vertical schedule: all micro-batches of a step go through a unit before the next unit."""
