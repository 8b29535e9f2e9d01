"""What a tier asks of a stepper: the part that owns master weights and state and updates them.

A stepper works on one kind of storage (host memory, device memory, a file) and knows nothing of
transfers, threads or streams. `plan` runs in the caller's thread and finds everything that can be
refused; `update` then runs chunk by chunk, on the host tier in its worker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero_offload.geometry import Geometry, Run
from zero_offload.grads import GradLedger
from zero_offload.storage import BlockFile
from zero_offload.update_rule import MASTER

__all__ = ["MASTER", "Chunk", "Stepper", "check_num_steps"]


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
        is_in_place: the shards lie on ``device`` too; if all have the master's dtype, they are
            their own master weights, and no second copy is kept.
        split: indices of shards whose master weights the subclass keeps in its own form.

    Attributes:
        is_in_place: whether the shards are the master weights, so that nothing is to be written
            to them after an update.
        dtype: of the master weights: fp32, or float64 when a shard is.
        num_steps: updates applied so far, for each piece.
        file: where master weights and state lie if not in memory.
    """

    file: BlockFile | None = None

    def __init__(
        self,
        geometry: Geometry,
        device: torch.device,
        *,
        is_in_place: bool,
        split: Collection[int] = (),
    ) -> None:
        self.geometry = geometry
        self.device = device
        self.dtype = geometry.master_dtype()
        self.num_steps = [0] * len(geometry.pieces)
        whole = [i for i in range(len(geometry.shards)) if i not in split]
        kind = device.type  # a shard that rests elsewhere cannot be updated in place
        self.is_in_place = is_in_place and all(
            shard.dtype == self.dtype and shard.device.type == kind
            for shard in (geometry.shards[i][1] for i in whole)
        )
        self._masters = {i: self._new_master(geometry.shards[i][1]) for i in whole}

    def _new_master(self, shard: Tensor) -> Tensor:
        if shard.is_meta:  # it rests elsewhere, and comes with the first write
            return torch.zeros(shard.numel(), dtype=self.dtype, device=self.device)
        return shard if self.is_in_place else shard.to(self.device, self.dtype, copy=True)

    def master(self, start: int, stop: int) -> Tensor:
        """The master weights' memory over a range inside one shard; split, their upper halves."""
        index = self.geometry.shard_at(start)
        base = self.geometry.shards[index][0]
        return self._masters[index][start - base : stop - base]

    def read_master(self, start: int, stop: int) -> Tensor:
        """A copy on the CPU over any range; zero between shards."""
        values = torch.zeros(stop - start, dtype=self.dtype, device="cpu")
        for a, b, _ in self.geometry.overlaps(start, stop):
            values[a - start : b - start].copy_(self.master(a, b))
        return values

    def write_master(self, start: int, values: Tensor) -> None:
        """Overwrite a range; in place, the shards have the values with that."""
        for a, b, _ in self.geometry.overlaps(start, start + values.numel()):
            self.master(a, b).copy_(values[a - start : b - start])

    @property
    def master_bytes(self) -> int:
        """Bytes of the master weights, also where a shard is one, or the upper half of one."""
        return sum(master.nbytes for master in self._masters.values())

    @property
    @abstractmethod
    def state_bytes(self) -> int:
        """Bytes of the optimizer's elementwise state, in the form that is kept."""

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
    def read(self, name: str, start: int, stop: int) -> Tensor:
        """A copy of a known state over any range: 1-D, on the CPU, zero where there is none."""

    @abstractmethod
    def write(self, name: str, start: int, values: Tensor) -> None:
        """Overwrite a known state over ``[start, start + values.numel())``."""

    @abstractmethod
    def read_scalars(self, piece: int) -> dict[str, float]:
        """``num_steps`` and the optimizer's own scalars of one piece."""

    @abstractmethod
    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        """Restore `read_scalars`; the piece's elementwise state counts from then on."""

    def settle(self) -> None:
        """After a step's last chunk, in the thread that updates: let what is under way end."""
        return  # memory has nothing under way

    def count(self, active: Sequence[int]) -> None:
        """Note one more update of the active pieces, when it has been planned."""
        for i in active:
            self.num_steps[i] += 1


def check_num_steps(scalars: Mapping[str, float]) -> int:
    """``num_steps`` of what is to be restored; ValueError if it is missing or no count."""
    found = scalars.get("num_steps")
    if found is None or found < 0 or found != int(found):
        raise ValueError(f"scalars need a whole, non-negative num_steps, got {dict(scalars)}")
    return int(found)
