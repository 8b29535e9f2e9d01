"""Quantized collectives: weight gathers (qwZ, hpZ) and gradient reductions (qgZ)."""

from zero_comm.collectives.quantized import QuantizedCollectives, create_collectives

__all__ = ["QuantizedCollectives", "create_collectives"]
