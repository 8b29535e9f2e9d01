"""Speeds of this machine (measured) or of a known device (from a table), used to predict times."""
