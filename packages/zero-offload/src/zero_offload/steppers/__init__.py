"""Steppers: storage and update of master weights and optimizer state."""
