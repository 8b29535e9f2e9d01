"""Predicted time and memory against measured ones."""
