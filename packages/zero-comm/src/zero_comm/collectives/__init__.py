"""Collectives for weight gathers (qwZ, hpZ) and gradient reductions (qgZ) with fewer bytes."""

from zero_comm.collectives.quantized import ExactGradients, QuantizedCollectives, create_collectives

__all__ = ["ExactGradients", "QuantizedCollectives", "create_collectives"]
