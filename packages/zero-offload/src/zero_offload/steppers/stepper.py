"""Interface between a tier and its stepper, which owns master weights and state and updates them.

A stepper works on one kind of storage (host memory, device memory, a file) and knows nothing of
transfers, threads or streams. `Stepper.plan` runs in the caller's thread and raises for everything
that can be refused. `Stepper.update` then runs chunk by chunk, on the host tier in its worker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero_offload.flat.geometry import Geometry, Run
from zero_offload.flat.grads import GradLedger, add_up
from zero_offload.memory.storage import BlockFile
from zero_offload.protocols import ChangeWatcher, Groups

_SQUARED_NUMEL = 1 << 20
"""Elements whose squares are summed at once: bounds the sum of gradients to 4 MiB."""

SpanMemory = Callable[[int, int], Tensor]
"""Returns memory for the rounded parameters of a range inside one shard."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Runs that are updated in one go, then published one by one."""

    runs: tuple[Run, ...]
    settings: Any = None


def spans_of(chunks: Sequence[Chunk]) -> list[tuple[int, int]]:
    """Return the elements of all runs."""
    return [(run.start, run.stop) for chunk in chunks for run in chunk.runs]


class ShardMasters:
    """Master weights of a flat space in one memory, shard by shard.

    With ``is_in_place`` the shards lie on ``device`` too. If all have the master's dtype, they are
    their own master weights, and no second copy is kept. ``upper_halves`` are, by shard, memory in
    the shard's dtype for the upper half of a split master weight. It is filled from the shard.

    Attributes:
        is_in_place: whether all whole master weights are the shards themselves.
        num_bytes: of all master weights, shards that are their own included.
        num_copy_bytes: of these, the bytes that are not the memory of a shard.
    """

    def __init__(
        self,
        geometry: Geometry,
        device: torch.device,
        *,
        is_in_place: bool,
        upper_halves: Mapping[int, Tensor] | None = None,
    ) -> None:
        upper, dtype = upper_halves or {}, geometry.master_dtype
        self.is_in_place = is_in_place and all(
            shard.dtype == dtype and shard.device.type == device.type
            for i, (_, shard) in enumerate(geometry.shards)
            if i not in upper
        )
        memory: list[Tensor] = []
        for i, (_, shard) in enumerate(geometry.shards):
            if i in upper:
                memory.append(upper[i].copy_(shard))
            elif shard.is_meta:  # an offloaded shard: its values come with the first write
                memory.append(torch.zeros(shard.numel(), dtype=dtype, device=device))
            else:
                copy = shard if self.is_in_place else shard.to(device, dtype, copy=True)
                memory.append(copy)
        starts = [start for start, _ in geometry.shards]
        masters = list(zip(starts, memory, strict=True))
        self._space = Geometry(geometry.numel, (), masters, 0, master_dtype=dtype)
        pairs = zip(memory, geometry.shards, strict=True)
        self.num_bytes = sum(master.nbytes for master in memory)
        self.num_copy_bytes = sum(
            m.nbytes for m, (_, t) in pairs if t.is_meta or m.data_ptr() != t.data_ptr()
        )

    def view(self, start: int, stop: int) -> Tensor:
        """Return the memory of a range inside one shard. Of a split master, the upper half."""
        return self._space.view(start, stop)

    def read(self, start: int, stop: int) -> Tensor:
        """Return a copy of any range on the CPU, zero between shards."""
        values = torch.zeros(stop - start, dtype=self._space.master_dtype, device="cpu")
        for a, b, master in self._space.overlaps(start, stop):
            values[a - start : b - start].copy_(master)
        return values

    def write(self, start: int, values: Tensor) -> None:
        """Overwrite a range. In place, the shards hold the values with that."""
        for a, b, master in self._space.overlaps(start, start + values.numel()):
            master.copy_(values[a - start : b - start])


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of a stepper's master weights and states, in the memory that it works in.

    ``master_copies`` are those of ``masters`` that are not the memory of a shard.
    """

    masters: int
    master_copies: int
    states: int


class Stepper(ABC):
    """Master weights and optimizer state of one flat space, and their update.

    Args:
        device: the memory of master weights and state.

    Attributes:
        has_kernel: whether a host kernel computes the update, and not torch.
        is_in_place: whether the shards are the master weights: an update writes nothing more to
            them.
        states: names and dtypes of the elementwise states, without the master weight.
        num_steps: updates of each piece.
        is_sequential: whether chunks must be updated in the order in which they were planned.
        file: the file of master weights and state, if they are not in memory.
        watcher: called before states change.
    """

    has_kernel: bool
    is_in_place: bool
    is_sequential: bool = False
    states: Mapping[str, torch.dtype]
    file: BlockFile | None = None

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self.geometry = geometry
        self.device = device
        self.num_steps = [0] * len(geometry.pieces)
        self.watcher: ChangeWatcher | None = None

    def announce(self, spans: Iterable[tuple[int, int]]) -> None:
        """Call the watcher. It precedes every change of states."""
        if self.watcher is not None:
            for span in spans:
                self.watcher.before_change(*span)

    @abstractmethod
    def num_bytes(self) -> StateBytes: ...

    @abstractmethod
    def plan(self, active: Sequence[int], groups: Groups, grads: GradLedger) -> list[Chunk]:
        """Return the chunks of a step in ascending order, or raise ValueError."""

    @abstractmethod
    def update(self, chunk: Chunk, grads: GradLedger, grad_scale: float, out: SpanMemory) -> None:
        """Update a chunk. Write the rounded values of each run to ``out``, unless in place."""

    def round_values(self, start: int, values: Tensor, out: Tensor) -> None:
        """Write master weights from ``start`` on to ``out``, rounded as by an update."""
        out.copy_(values.to(self.geometry.master_dtype))

    @abstractmethod
    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return a 1-D CPU copy of a state or of ``master_weight``, zero where there is none."""

    def peek(self, name: str, start: int, stop: int) -> Tensor:
        """Do as `read`, in any thread, for a range that is not being updated."""
        return self.read(name, start, stop)

    @abstractmethod
    def write(self, name: str, start: int, values: Tensor) -> None:
        """Overwrite a known state or ``master_weight`` from ``start`` on."""

    @abstractmethod
    def read_scalars(self, piece: int) -> dict[str, float]:
        """Return ``num_steps`` and the optimizer's own scalars of one piece."""

    @abstractmethod
    def check_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        """Raise ValueError for scalars that `read_scalars` of this optimizer does not return."""

    @abstractmethod
    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        """Restore `read_scalars`, checked. The piece's elementwise state counts from then on."""

    def square_sum(self, terms: list[Tensor]) -> float:
        """Return the sum of the squares of the sum of ``terms``, in double precision.

        Any thread may call it. ``terms`` are 1-D, in host memory; their sum is taken in the dtype
        of the master weights, in order.
        """
        found = 0.0
        for start in range(0, terms[0].numel(), _SQUARED_NUMEL):
            parts = [term[start : start + _SQUARED_NUMEL] for term in terms]
            total = torch.empty(parts[0].numel(), dtype=self.geometry.master_dtype, device="cpu")
            add_up(parts, total)
            found += float(torch.linalg.vector_norm(total, dtype=torch.float64).square())
        return found

    def settle(self) -> None:
        """Complete transfers after a step's last chunk, in the thread that updates."""
        return  # memory has no transfers

    def count(self, active: Sequence[int]) -> None:
        """Count one more update of the active pieces, once it has been planned."""
        for i in active:
            self.num_steps[i] += 1


def check_num_steps(scalars: Mapping[str, float]) -> int:
    """Return ``num_steps`` of scalars to be restored, or raise ValueError if it is no count."""
    found = scalars.get("num_steps")
    if found is None or found < 0 or found != int(found):
        raise ValueError(f"scalars need a whole, non-negative num_steps, got {dict(scalars)}")
    return int(found)
