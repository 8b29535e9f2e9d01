"""Core of every engine: units, flat parameters, flat gradients, forward and backward passes."""
