"""Saves beside training."""
