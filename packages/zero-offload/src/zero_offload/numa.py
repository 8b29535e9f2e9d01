"""Deprecated: zero-offload binds no threads and no memory to NUMA nodes any more."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch

ADVICE = (
    "zero-offload no longer binds threads or memory to a NUMA node: start the ranks with "
    "torchrun --numa-binding=node, or with numactl"
)


class Placement(NamedTuple):
    """NUMA placement of a device, of which nothing is found or bound."""

    device: str
    node: None = None
    cpus: frozenset[int] = frozenset()
    reason: str = ADVICE


def locate(device: torch.device) -> Placement:
    """Return a placement that binds nothing. Deprecated, removed in the next release."""
    warnings.warn(ADVICE, DeprecationWarning, stacklevel=2)
    return Placement(str(device))
