"""Copies of all states in host memory after every step, for a restart without loss."""
