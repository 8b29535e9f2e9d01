"""Master weights and optimizer state in host memory.

Ring of host memory, whose spans are taken in order and freed in any order.

A span is contiguous. It ends where the memory ends or where the oldest span in use begins. A
span that does not fit before the end of the memory begins at its start. The gap that it leaves is
free again with that span.

Undo log: updates ahead of a step's decision, such that they can be undone.

A step may be clipped or skipped for what the last gradient of backward brings. An update that does
not wait for that is *tentative*: the log holds what is needed to end it either way. It is the
speculation and rollback of SuperOffload (arXiv 2509.21271), exact and without a change of values
that anybody could see.

[Note: tentative updates]
record   of one chunk of tentative updates: for each buffer of its states a copy, in a ring of host
         memory
saved    a buffer that nobody else reads is updated where it is, and the copy has the old values
shadow   a buffer in a parameter shard's memory, which gathers read: a full-precision shard that is
         its own master weight, or the upper half of a split one. The copy is updated, and the shard
         keeps the old values

`UndoLog.keep` copies the shadows to their shards. `UndoLog.undo` copies back what is saved, and
drops the shadows. A chunk for which the ring has no room is not updated ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_offload.flat.geometry import Geometry, Run, SpanMap, split_runs
from zero_offload.flat.grads import GradLedger
from zero_offload.protocols import Groups
from zero_offload.rules.compact import WINDOW_NUMEL
from zero_offload.rules.rule import MASTER, PARAM, REMAINDER, Rule
from zero_offload.steppers.stepper import (
    Block,
    BlockLayout,
    Chunk,
    RuleStepper,
    ShardMasters,
    SpanMemory,
    StateBytes,
    spans_of,
)

ALIGNMENT = 64
"""Bytes of a cache line. Spans are rounded up to multiples of it."""


def aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(slots=True, eq=False)
class RingSpan:
    """Memory that was taken from a ring: ``memory`` is uint8, 1-D."""

    start: int
    memory: Tensor
    is_free: bool = False


class HostRing:
    """Host memory of ``capacity`` bytes, allocated with the first span. One thread uses it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._memory: Tensor | None = None
        self._spans: deque[RingSpan] = deque()  # in use, and free ones behind such
        self._head = 0  # where the next span begins

    def take(self, nbytes: int) -> RingSpan | None:
        """Return a span of ``nbytes``, rounded up, or None if there is no room for it now."""
        needed = aligned(nbytes)
        start = self._place(needed)
        if start is None:
            return None
        if self._memory is None:
            # Aligned to a cache line, wherever the allocator begins.
            memory = torch.empty(self.capacity + ALIGNMENT, dtype=torch.uint8, device="cpu")
            self._memory = memory[-memory.data_ptr() % ALIGNMENT :][: self.capacity]
        span = RingSpan(start, self._memory[start : start + needed])
        self._spans.append(span)
        self._head = start + needed
        return span

    def _place(self, needed: int) -> int | None:
        if not self._spans:
            self._head = 0
            return 0 if needed <= self.capacity else None
        tail = self._spans[0].start
        if tail >= self._head:  # it has gone round
            return self._head if needed <= tail - self._head else None
        if needed <= self.capacity - self._head:
            return self._head
        return 0 if needed <= tail else None

    def free(self, span: RingSpan) -> None:
        """Free a span. Its memory is reused once all spans before it are free."""
        span.is_free = True
        while self._spans and self._spans[0].is_free:
            self._spans.popleft()


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """Copies that end one chunk's tentative update. See `zero_offload.steppers.memory_stepper`.

    ``saved`` has the buffers that were updated, each with a copy of its old values, ``shadows``
    those that were not, each with its new values. ``span`` is the memory of the copies.
    """

    chunk: Chunk
    saved: list[tuple[Tensor, Tensor]]
    shadows: list[tuple[Tensor, Tensor]]
    span: RingSpan


_MOST_BUFFERS = 6
"""Maximum buffers of an element: a split master weight, 8-bit moments and their scales."""


def undo_capacity(geometry: Geometry, num_bytes: int) -> int:
    """Return the bytes of a ring for records of all of a flat space.

    ``num_bytes`` are of master weights and states, with shards that are master weights or halves.
    """
    num_spans = len(geometry.pieces) + len(geometry.shards)
    num_spans += geometry.numel // geometry.published_numel
    return aligned(num_bytes) + ALIGNMENT * _MOST_BUFFERS * num_spans


class MemoryStepper(RuleStepper):
    """`RuleStepper` over one block per shard, or per piece under a rule with blocks.

    ``upper`` returns host memory for the parameters of a range inside one shard, which lasts as
    long as the stepper. A split master weight has its upper half there.
    """

    def __init__(
        self,
        geometry: Geometry,
        rule: Rule,
        groups: Groups,
        *,
        is_in_place: bool,
        upper: SpanMemory,
    ) -> None:
        # An offloaded shard is no place for the upper half of a split master weight.
        shards = [shard for _, shard in geometry.shards]
        rules = [rule if t.is_meta else rule.for_params(t.dtype) for t in shards]
        super().__init__(geometry, rule, BlockLayout(geometry, rules), groups)
        halves = {
            i: upper(start, start + shard.numel())
            for i, (start, shard) in enumerate(geometry.shards)
            if rules[i].is_master_split
        }
        self._masters = ShardMasters(
            geometry, self.device, is_in_place=is_in_place, upper_halves=halves
        )
        self.is_in_place = self._masters.is_in_place
        self._buffers: dict[str, Sequence[Tensor]] = {}  # divided among the blocks
        for name in self.layout.names:
            if name not in (MASTER, PARAM):
                kept = [block.kept.get(name) for block in self.layout.blocks]
                sizes = [0 if found is None else found[1] for found in kept]
                dtype = next((found[0] for found in kept if found is not None), torch.uint8)
                whole = torch.zeros(sum(sizes), dtype=dtype, device="cpu")
                self._buffers[name] = torch.split(whole, sizes)
        self.fill_fresh()

    def num_bytes(self) -> StateBytes:
        bytes_of = {name: sum(t.nbytes for t in found) for name, found in self._buffers.items()}
        lower = bytes_of.pop(REMAINDER, 0)
        masters, copies = self._masters.num_bytes + lower, self._masters.num_copy_bytes + lower
        return StateBytes(masters, copies, sum(bytes_of.values()))

    def chunks(self, runs: Sequence[Run]) -> list[Chunk]:
        """One chunk per run, so that each is published as soon as it is updated."""
        if self.rule.block == 1:
            runs = split_runs(runs, self.geometry.published_numel)
        return [Chunk((run,)) for run in runs]

    def take(self, index: int) -> dict[str, Tensor]:
        block = self.layout.blocks[index]
        stored = {name: found[index] for name, found in self._buffers.items() if name in block.kept}
        master = PARAM if block.rule.is_master_split else MASTER
        return {master: self._masters.view(block.start, block.stop), **stored}

    def put(self, index: int) -> None:
        """Return at once: `take` gave the memory itself."""

    def undo_capacity(self) -> int:
        """Return the bytes of a ring that has room for records of all elements."""
        num_bytes = self.num_bytes()
        return undo_capacity(self.geometry, num_bytes.masters + num_bytes.states)

    def update_tentatively(
        self, chunk: Chunk, grads: GradLedger, grad_scale: float, ring: HostRing
    ) -> Record | None:
        """Update a chunk but leave the shards. Do nothing, and return None, if the ring is full."""
        spans = [
            (run, start, stop, block, block.clip(self.take(index), start, stop))
            for run in chunk.runs
            for index, start, stop in self.layout.overlaps(run.start, run.stop)
            for block in (self.layout.blocks[index],)
        ]
        homes = [home for *_, stored in spans for home in stored.values()]
        span = ring.take(sum(aligned(home.nbytes) for home in homes))
        if span is None:
            return None
        # What gathers read from a shard keeps its values.
        shadowed = (MASTER, PARAM) if self.is_in_place else (PARAM,)
        record, at = Record(chunk, [], [], span), 0
        for run, start, stop, block, stored in spans:
            used, copies = dict(stored), []
            for name, home in stored.items():
                copy = span.memory[at : at + home.nbytes].view(home.dtype)
                at += aligned(home.nbytes)
                copies.append((home, copy))
                if name in shadowed:
                    used[name] = copy
                    record.shadows.append((home, copy))
                else:
                    record.saved.append((home, copy))
            self.update_span(block, start, stop, used, grads, run.key, grad_scale, None, copies)
        return record

    def round_to(self, start: int, stop: int, out: Tensor) -> None:
        """Write the rounded values of a range inside one shard to ``out``, as an update does."""
        master = self._masters.view(start, stop)
        if out.data_ptr() != master.data_ptr():  # else it is the upper half of a split one
            out.copy_(master)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return a copy. Padding of a split master weight has no lower half."""
        if name == MASTER:
            values = self._masters.read(start, stop)
        else:
            values = torch.zeros(stop - start, dtype=self.rule.states[name], device="cpu")
        for block, stored, a, b in self._windows(name, start, stop):
            values[a - start : b - start].copy_(block.decode(stored, name, a, b))
        return values

    def write(self, name: str, start: int, values: Tensor) -> None:
        if name == MASTER:
            self._masters.write(start, values)
        for block, stored, a, b in self._windows(name, start, start + values.numel()):
            block.encode(stored, name, a, values[a - start : b - start])

    def _windows(
        self, name: str, start: int, stop: int
    ) -> Iterator[tuple[Block, dict[str, Tensor], int, int]]:
        """The blocks in a range that are coded. Whole master weights are not."""
        for index, low, high in self.layout.overlaps(start, stop):
            block = self.layout.blocks[index]
            if name == MASTER and not block.rule.is_master_split:
                continue
            stored = self.take(index)
            while low < high:
                end = min(high, low + WINDOW_NUMEL - (low - block.start) % WINDOW_NUMEL)
                yield block, stored, low, end
                low = end


class UndoLog:
    """Records of the tentative updates of one tier. The thread that updates uses it.

    If an update finds a record of its elements, that record is to be undone: the step before has
    been published, and its record dropped.

    Attributes:
        num_kept: elements whose tentative updates were kept so far.
        num_undone: elements whose tentative updates were undone so far.
    """

    def __init__(self, stepper: MemoryStepper, ring: HostRing) -> None:
        self._stepper = stepper
        self._ring = ring
        self._records: SpanMap[Record] = SpanMap()
        self.num_kept = 0
        self.num_undone = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the ring."""
        return self._ring.capacity

    def update(self, chunk: Chunk, grads: GradLedger, grad_scale: float) -> None:
        """Update a chunk tentatively, if there is room."""
        self.undo(chunk)
        record = self._stepper.update_tentatively(chunk, grads, grad_scale, self._ring)
        if record is not None:
            for run in chunk.runs:
                self._records.put(run.start, run.stop, record)

    def has(self, chunk: Chunk) -> bool:
        """Return whether a chunk is updated tentatively."""
        return any(record.chunk is chunk for record in self._of(chunk))

    def round_to(self, chunk: Chunk, out: SpanMemory) -> None:
        """Write what an update of a chunk writes to ``out``, from the master weights."""
        for run in chunk.runs:
            self._stepper.round_to(run.start, run.stop, out(run.start, run.stop))

    def keep(self, chunk: Chunk) -> bool:
        """Make a chunk's tentative update final. Return whether there is one."""
        if not self.has(chunk):
            return False
        (record,) = self._of(chunk)
        self.num_kept += self._drop(record)
        for home, new in record.shadows:
            home.copy_(new)
        return True

    def undo(self, chunk: Chunk) -> None:
        """Restore the states of a chunk's elements, if they were updated tentatively."""
        for record in self._of(chunk):
            self.num_undone += self._drop(record)
            for home, old in record.saved:
                home.copy_(old)

    def _of(self, chunk: Chunk) -> list[Record]:
        spans = spans_of([chunk])
        found = [record for span in spans for *_, record in self._records.overlaps(*span)]
        return list(dict.fromkeys(found))

    def _drop(self, record: Record) -> int:
        """Forget a record and return its number of elements. Its copies stay for the moment."""
        for run in record.chunk.runs:
            self._records.discard(run.start, run.stop)
        self._ring.free(record.span)
        return sum(run.stop - run.start for run in record.chunk.runs)
