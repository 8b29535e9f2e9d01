"""What a tier asks of a stepper: the part that owns master weights and state and updates them.

A stepper works on flat memory of one kind (host or device) and knows nothing of transfers, threads
or streams. `plan` runs in the caller's thread and finds everything that can be refused; `update`
then runs chunk by chunk, on the host tier in its worker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero_offload.geometry import Geometry, Run
from zero_offload.grads import GradLedger

__all__ = ["MASTER", "Chunk", "Stepper"]

MASTER = "master_weight"


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is updated in one go, then published run by run. ``settings`` is the stepper's own."""

    runs: tuple[Run, ...]
    settings: Any


class Stepper(ABC):
    """Master weights and optimizer state of one flat space, and their update.

    Attributes:
        master: ``(numel,)``, fp32 (float64 when a shard is), the unrounded weights.
        num_steps: updates applied so far, for each piece.
    """

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self.geometry = geometry
        self.device = device
        self.master = torch.zeros(geometry.numel, dtype=geometry.master_dtype(), device=device)
        for a, b, view in geometry.overlaps(0, geometry.numel):
            self.master[a:b].copy_(view)
        self.num_steps = [0] * len(geometry.pieces)

    @abstractmethod
    def plan(
        self, active: Sequence[int], groups: Sequence[Mapping[str, Any]], grads: GradLedger
    ) -> list[Chunk]:
        """Chunks in ascending order. ValueError for a missing gradient or a refused setting."""

    @abstractmethod
    def update(
        self,
        chunk: Chunk,
        grads: GradLedger,
        grad_scale: float,
        out: Callable[[int, int], Tensor],
    ) -> None:
        """Update a chunk; write each run's rounded values to ``out(run.start, run.stop)``."""

    @abstractmethod
    def state_dtypes(self) -> Mapping[str, torch.dtype]:
        """Names of the elementwise states, without the master, and their dtypes."""

    @abstractmethod
    def buffer(self, name: str, *, create: bool) -> Tensor | None:
        """The flat buffer of a known state; None when nothing was stored and not ``create``."""

    @abstractmethod
    def read_scalars(self, piece: int) -> dict[str, float]:
        """``num_steps`` and the optimizer's own scalars of one piece."""

    @abstractmethod
    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        """Restore `read_scalars`; the piece's elementwise state counts from then on."""

    def count(self, active: Sequence[int]) -> None:
        """Note one more update of the active pieces."""
        for i in active:
            self.num_steps[i] += 1

    def clear(self, piece: int) -> None:
        """Zero a piece's elementwise state and its count."""
        start, stop = self.geometry.pieces[piece].start, self.geometry.pieces[piece].stop
        for name in self.state_dtypes():
            stored = self.buffer(name, create=False)
            if stored is not None:
                stored[start:stop].zero_()
        self.num_steps[piece] = 0


def check_num_steps(scalars: Mapping[str, float]) -> int:
    """``num_steps`` of what is to be restored; ValueError if it is missing or no count."""
    found = scalars.get("num_steps")
    if found is None or found < 0 or found != int(found):
        raise ValueError(f"scalars need a whole, non-negative num_steps, got {dict(scalars)}")
    return int(found)
