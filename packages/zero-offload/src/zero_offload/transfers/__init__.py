"""Copies of gradients and parameters between the compute device and a host tier."""
