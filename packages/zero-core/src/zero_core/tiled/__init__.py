"""Modules and losses that are computed tile by tile, a few tokens at a time."""
