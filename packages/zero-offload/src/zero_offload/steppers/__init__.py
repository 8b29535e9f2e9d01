"""Steppers: master weights and optimizer state in one kind of storage, and their update."""
