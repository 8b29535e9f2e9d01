"""Master weights and optimizer state in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_offload.flat.geometry import Geometry, Run, split_runs
from zero_offload.flat.grads import GradLedger
from zero_offload.memory.ring import ALIGNMENT, HostRing, RingSpan, aligned
from zero_offload.protocols import Groups
from zero_offload.rules.codes import WINDOW_NUMEL
from zero_offload.rules.rule import MASTER, PARAM, REMAINDER, Rule
from zero_offload.steppers.rule_stepper import Block, BlockLayout, RuleStepper
from zero_offload.steppers.stepper import Chunk, ShardMasters, SpanMemory, StateBytes


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """Copies that end one chunk's tentative update. See `zero_offload.steppers.undo`.

    ``saved`` has the buffers that were updated, each with a copy of its old values, ``shadows``
    those that were not, each with its new values. ``span`` is the memory of the copies.
    """

    chunk: Chunk
    saved: list[tuple[Tensor, Tensor]]
    shadows: list[tuple[Tensor, Tensor]]
    span: RingSpan


_MOST_BUFFERS = 6
"""Of an element: a split master weight, and two moments of 8 bits with their scales."""


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
