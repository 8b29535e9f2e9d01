"""Gathers, releases and reductions of units, and the hooks that trigger them."""
