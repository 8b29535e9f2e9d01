"""Patches of the weights: written by a training, applied by receivers elsewhere."""
