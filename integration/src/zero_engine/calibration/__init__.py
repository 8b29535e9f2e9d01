"""Speeds of a machine for plans: measured, or taken from a table of devices."""
