"""Core of every engine: units, flat parameters and gradients, passes. Features do not change it."""
