"""Optimizers, the state tiers that run them on the device, and learning-rate schedules."""
