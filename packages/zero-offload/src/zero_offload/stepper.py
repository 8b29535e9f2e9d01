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

    Args:
        geometry: the flat space.
        device: where master weights and state live.
        is_in_place: the shards lie on ``device`` too; those of the master's dtype are then their
            own master weights, and no second copy is kept.

    Attributes:
        dtype: of the master weights: fp32, or float64 when a shard is.
        num_steps: updates applied so far, for each piece.
    """

    def __init__(self, geometry: Geometry, device: torch.device, *, is_in_place: bool) -> None:
        self.geometry = geometry
        self.device = device
        self.dtype = geometry.master_dtype()
        self.num_steps = [0] * len(geometry.pieces)
        self._master: Tensor | None = None
        kind = device.type  # a shard that rests elsewhere cannot be updated in place
        if not is_in_place or any(
            t.dtype != self.dtype or t.device.type != kind for _, t in geometry.shards
        ):
            self._master = torch.zeros(geometry.numel, dtype=self.dtype, device=device)
            for a, b, view in geometry.overlaps(0, geometry.numel):
                if not view.is_meta:
                    self._master[a:b].copy_(view)

    @property
    def is_in_place(self) -> bool:
        """Whether the shards are the master weights."""
        return self._master is None

    def master(self, start: int, stop: int) -> Tensor:
        """The master weights' memory over a range inside one shard."""
        if self._master is None:
            return self.geometry.view(start, stop)
        return self._master[start:stop]

    def read_master(self, start: int, stop: int) -> Tensor:
        """A copy on the CPU over any range; zero between shards."""
        if self._master is not None:
            return self._master[start:stop].to("cpu", copy=True)
        values = torch.zeros(stop - start, dtype=self.dtype, device="cpu")
        for a, b, view in self.geometry.overlaps(start, stop):
            values[a - start : b - start].copy_(view)
        return values

    def write_master(self, start: int, values: Tensor) -> None:
        """Overwrite a range; in place, the shards have the values with that."""
        for a, b, _ in self.geometry.overlaps(start, start + values.numel()):
            self.master(a, b).copy_(values[a - start : b - start])

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
        """Update a chunk; write each run's rounded values to ``out(run.start, run.stop)``.

        In place there is nothing to write: the shards have been updated.
        """

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
