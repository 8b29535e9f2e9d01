"""Optimizers, the state tiers that run torch's optimizers, and the progress of a training."""
