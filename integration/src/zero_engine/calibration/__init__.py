"""Speeds of a machine for plans: measured on it, or from a table of devices."""
