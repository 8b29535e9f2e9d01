from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from zero_core.protocols import EXACT_GRADIENTS, TransportCollectives, Work


class Launch(NamedTuple):
    """A launched collective. Its string form is kind and unit, such as "f0".

    Kinds: "f", "b" gather parameters in forward, backward. "g" gathers gradients, "r" reduces them.
    """

    kind: str
    unit: int
    numel: int
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.kind}{self.unit}"


class LoggedCollectives:
    """The engine's collectives with a log. Use: ``collectives=LoggedCollectives.factory(log)``."""

    def __init__(self, native: TransportCollectives, log: list[Launch]) -> None:
        self.native = native
        self.log = log

    @classmethod
    def factory(cls, log: list[Launch]) -> Callable[..., LoggedCollectives]:
        return lambda native, **settings: cls(native, log)

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> Work:
        kind = "g" if version == EXACT_GRADIENTS else "b" if backward else "f"
        self.log.append(Launch(kind, unit, out.numel(), out.dtype))
        return self.native.all_gather(out, shard, unit=unit, version=version, backward=backward)

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        self.log.append(Launch("r", unit, full.numel(), full.dtype))
        return self.native.reduce_scatter(out, full, unit=unit)
