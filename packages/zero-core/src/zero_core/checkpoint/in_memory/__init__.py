"""Copies of all states in host memory, made after steps, for a restart without loss."""
