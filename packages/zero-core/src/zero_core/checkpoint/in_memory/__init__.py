"""Copies of all states in host memory, made after every step, for a restart without loss."""
