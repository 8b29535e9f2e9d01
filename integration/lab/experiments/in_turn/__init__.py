"""Costs of a configuration key, by engines with and without the key that train in turn."""
