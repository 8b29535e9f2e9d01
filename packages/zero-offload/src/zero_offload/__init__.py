"""Optimizer state on the host (ZeRO-Offload), or divided between host and device (Twin-Flow).

`OffloadedOptimizer` needs no engine. `create_tier` and `create_param_tier` are for engines.
"""

from importlib.metadata import version as _version

from zero_offload.errors import OffloadError, StorageCorruptError, StorageError
from zero_offload.optimizer import OffloadedOptimizer
from zero_offload.param_tier import create_param_tier
from zero_offload.rules.resolve import ELEMENTWISE
from zero_offload.tier import create_tier

__all__ = [
    "ELEMENTWISE",
    "OffloadError",
    "OffloadedOptimizer",
    "StorageCorruptError",
    "StorageError",
    "create_param_tier",
    "create_tier",
]
__version__ = _version("zero-offload")
