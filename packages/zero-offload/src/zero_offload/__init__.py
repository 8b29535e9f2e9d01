"""Optimizer state on the host: ZeRO-Offload and an element-exact Twin-Flow, for any torch loop.

`OffloadedOptimizer` works by itself; `create_tier` is what an engine asks for.
"""

from zero_offload import numa
from zero_offload.elementwise import ELEMENTWISE
from zero_offload.optimizer import OffloadedOptimizer
from zero_offload.param_tier import create_param_tier
from zero_offload.progress import OffloadError
from zero_offload.tier import create_tier

__all__ = [
    "ELEMENTWISE",
    "OffloadError",
    "OffloadedOptimizer",
    "create_param_tier",
    "create_tier",
    "numa",
]
__version__ = "0.1.0"
