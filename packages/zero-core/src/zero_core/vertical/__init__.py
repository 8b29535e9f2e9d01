"""Vertical schedule: all micro-batches of a step pass through a unit before the next unit."""
