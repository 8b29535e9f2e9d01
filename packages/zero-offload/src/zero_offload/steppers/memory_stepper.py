"""Master weights and optimizer state in host memory, and updates that can be undone.

[Note: tentative updates]
A tentative update runs during backward, before it is known whether the step is clipped or skipped,
as in the speculation and rollback of SuperOffload (arXiv 2509.21271). Undoing it restores all bits.
Only the update thread sees tentative values.

record  copies of all buffers of one chunk that a tentative update needs, in `UndoMemory`.
saved   buffer that only the update thread reads. It is updated, and the copy has the old values.
shadow  buffer of parameters, which other threads or copies to the device read. The copy is updated,
        and the buffer keeps the old values.

`UndoLog.keep` copies the new values of shadows to their buffers. `UndoLog.undo` restores saved
buffers. A chunk without room for its record is not updated tentatively.
"""

from __future__ import annotations

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
"""Bytes of a cache line. The memory of a record is a multiple of it."""


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class UndoMemory:
    """Host memory of ``capacity`` bytes for records, allocated with the first one.

    Records are placed one after another. The memory is reused once all of them are freed.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._memory: Tensor | None = None
        self._used = self._num_records = 0

    def take(self, nbytes: int) -> Tensor | None:
        """Return uint8 memory of ``nbytes``, rounded up to `ALIGNMENT`, or None if full."""
        needed = aligned(nbytes)
        if needed > self.capacity - self._used:
            return None
        if self._memory is None:
            # The allocator's memory may not be aligned to a cache line.
            memory = torch.empty(self.capacity + ALIGNMENT, dtype=torch.uint8, device="cpu")
            self._memory = memory[-memory.data_ptr() % ALIGNMENT :][: self.capacity]
        self._num_records += 1
        self._used += needed
        return self._memory[self._used - needed : self._used]

    def free(self) -> None:
        """Free one record."""
        self._num_records -= 1
        if not self._num_records:
            self._used = 0


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """Copies for one chunk's tentative update.

    ``saved`` pairs updated buffers with copies of their old values, ``shadows`` unchanged buffers
    with copies that have the new values. See [Note: tentative updates].
    """

    chunk: Chunk
    saved: list[tuple[Tensor, Tensor]]
    shadows: list[tuple[Tensor, Tensor]]


_MOST_BUFFERS = 6
"""Maximum buffers of an element: a split master weight, 8-bit moments and their scales."""


def undo_capacity(geometry: Geometry, num_bytes: int) -> int:
    """Return the memory for records of all elements, whose buffers have ``num_bytes``."""
    num_spans = len(geometry.pieces) + len(geometry.shards)
    num_spans += geometry.numel // geometry.published_numel
    return aligned(num_bytes) + ALIGNMENT * _MOST_BUFFERS * num_spans


class MemoryStepper(RuleStepper):
    """`RuleStepper` with one block per shard, or per piece under a rule with blocks.

    ``upper`` returns permanent host memory for the parameters of a range inside one shard. That
    memory stores the upper half of a split master weight.
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
        # A shard on the meta device has no memory for the upper half of a split master weight.
        shards = [shard for _, shard in geometry.shards]
        rules = [rule if t.is_meta else rule.for_params(t.dtype) for t in shards]
        super().__init__(geometry, rule, BlockLayout(geometry, rules), groups)
        halves = {
            i: upper(start, start + shard.numel())
            for i, (start, shard) in enumerate(geometry.shards)
            if rules[i].is_master_split
        }
        self.masters = ShardMasters(
            geometry, self.device, is_in_place=is_in_place, upper_halves=halves
        )
        self.is_in_place = self.masters.is_in_place
        self._buffers: dict[str, Sequence[Tensor]] = {}  # one tensor per block
        for name in self.layout.names:
            if name not in (MASTER, PARAM):
                kept = [block.kept.get(name) for block in self.layout.blocks]
                sizes = [0 if found is None else found[1] for found in kept]
                dtype = next((found[0] for found in kept if found is not None), torch.uint8)
                whole = torch.zeros(sum(sizes), dtype=dtype, device="cpu")
                self._buffers[name] = torch.split(whole, sizes)
        self.fill(range(len(geometry.pieces)), is_fresh=True)

    def num_bytes(self) -> StateBytes:
        bytes_of = {name: sum(t.nbytes for t in found) for name, found in self._buffers.items()}
        lower = bytes_of.pop(REMAINDER, 0)
        masters, copies = self.masters.num_bytes + lower, self.masters.num_copy_bytes + lower
        return StateBytes(masters, copies, sum(bytes_of.values()))

    def chunks(self, runs: Sequence[Run]) -> list[Chunk]:
        """Return one chunk per run, to publish early. Long runs are split if the rule allows it."""
        if self.rule.block == 1:
            runs = split_runs(runs, self.geometry.published_numel)
        return [Chunk((run,)) for run in runs]

    def take(self, index: int) -> dict[str, Tensor]:
        block = self.layout.blocks[index]
        stored = {name: found[index] for name, found in self._buffers.items() if name in block.kept}
        master = PARAM if block.rule.is_master_split else MASTER
        return {master: self.masters.view(block.start, block.stop), **stored}

    def put(self, index: int) -> None:
        """Do nothing: `take` returned the stored memory itself."""

    def undo_capacity(self) -> int:
        num_bytes = self.num_bytes()
        return undo_capacity(self.geometry, num_bytes.masters + num_bytes.states)

    def update_tentatively(
        self, chunk: Chunk, grads: GradLedger, grad_scale: float, log: UndoMemory
    ) -> Record | None:
        """Update a chunk so that it can be undone. Return None if ``log`` has no room for it."""
        spans = [
            (run, start, stop, block, block.clip(self.take(index), start, stop))
            for run in chunk.runs
            for index, start, stop in self.layout.overlaps(run.start, run.stop)
            for block in (self.layout.blocks[index],)
        ]
        homes = [home for *_, stored in spans for home in stored.values()]
        memory = log.take(sum(aligned(home.nbytes) for home in homes))
        if memory is None:
            return None
        # All-gathers or copies to the device may read these buffers until the step is confirmed.
        shadowed = (MASTER, PARAM) if self.is_in_place else (PARAM,)
        record, at = Record(chunk, [], []), 0
        for run, start, stop, block, stored in spans:
            used, copies = dict(stored), []
            for name, home in stored.items():
                copy = memory[at : at + home.nbytes].view(home.dtype)
                at += aligned(home.nbytes)
                copies.append((home, copy))
                if name in shadowed:
                    used[name] = copy
                    record.shadows.append((home, copy))
                else:
                    record.saved.append((home, copy))
            self.update_span(block, start, stop, used, grads, run.key, grad_scale, None, copies)
        return record

    def read(self, name: str, start: int, stop: int) -> Tensor:
        if name == MASTER:
            values = self.masters.read(start, stop)
        else:
            values = torch.zeros(stop - start, dtype=self.rule.states[name], device="cpu")
        for block, stored, a, b in self._windows(name, start, stop):
            values[a - start : b - start].copy_(block.decode(stored, name, a, b))
        return values

    def write(self, name: str, start: int, values: Tensor) -> None:
        if name == MASTER:
            self.masters.write(start, values)
        for block, stored, a, b in self._windows(name, start, start + values.numel()):
            block.encode(stored, name, a, values[a - start : b - start])

    def _windows(
        self, name: str, start: int, stop: int
    ) -> Iterator[tuple[Block, dict[str, Tensor], int, int]]:
        """Yield ``(block, buffers, a, b)`` for windows of a range, none for unsplit masters."""
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
    """Records of a tier's tentative updates, changed by the update thread only."""

    def __init__(self, stepper: MemoryStepper, memory: UndoMemory) -> None:
        self._stepper = stepper
        self._memory = memory
        self._records: SpanMap[Record] = SpanMap()
        self.num_kept = 0
        self.num_undone = 0

    @property
    def num_bytes(self) -> int:
        return self._memory.capacity

    def update(self, chunk: Chunk, grads: GradLedger, grad_scale: float) -> None:
        self.undo(chunk)
        record = self._stepper.update_tentatively(chunk, grads, grad_scale, self._memory)
        if record is not None:
            for run in chunk.runs:
                self._records.put(run.start, run.stop, record)

    def has(self, chunk: Chunk) -> bool:
        return any(record.chunk is chunk for record in self._of(chunk))

    def round_to(self, chunk: Chunk, out: SpanMemory) -> None:
        """Write a chunk's rounded master weights to the memory that ``out`` returns."""
        for start, stop in spans_of([chunk]):
            master, rounded = self._stepper.masters.view(start, stop), out(start, stop)
            # `out` may return the upper half of the split master weight itself.
            if rounded.data_ptr() != master.data_ptr():
                rounded.copy_(master)

    def keep(self, chunk: Chunk) -> bool:
        """Make a chunk's tentative update final. Return False if there is none."""
        if not self.has(chunk):
            return False
        (record,) = self._of(chunk)
        self.num_kept += self._drop(record)
        for home, new in record.shadows:
            home.copy_(new)
        return True

    def undo(self, chunk: Chunk) -> None:
        for record in self._of(chunk):
            self.num_undone += self._drop(record)
            for home, old in record.saved:
                home.copy_(old)

    def _of(self, chunk: Chunk) -> list[Record]:
        spans = spans_of([chunk])
        found = [record for span in spans for *_, record in self._records.overlaps(*span)]
        return list(dict.fromkeys(found))

    def _drop(self, record: Record) -> int:
        """Remove a record, return its numel. Its copies are valid until the next `update`."""
        for run in record.chunk.runs:
            self._records.discard(run.start, run.stop)
        self._memory.free()
        return sum(run.stop - run.start for run in record.chunk.runs)
