"""Costs of a key: engines with and without it train in turn."""
