"""Undo log: updates ahead of a step's decision, such that they can be undone.

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

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from zero_offload.flat.geometry import Geometry
from zero_offload.flat.grads import GradLedger
from zero_offload.flat.intervals import SpanMap
from zero_offload.memory.ring import ALIGNMENT, HostRing, RingSpan, aligned
from zero_offload.steppers.stepper import Chunk, SpanMemory


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """Copies that end one chunk's tentative update. See [Note: tentative updates].

    Attributes:
        chunk: the chunk.
        saved: buffers that were updated, each with a copy of its old values.
        shadows: buffers that were not, each with its new values.
        span: memory of the copies.
    """

    chunk: Chunk
    saved: list[tuple[Tensor, Tensor]]
    shadows: list[tuple[Tensor, Tensor]]
    span: RingSpan


@runtime_checkable
class UndoableStepper(Protocol):
    """A `zero_offload.steppers.stepper.Stepper` whose updates can be undone."""

    def undo_capacity(self) -> int:
        """Return the bytes of a ring that has room for records of all elements."""

    def update_tentatively(
        self, chunk: Chunk, grads: GradLedger, grad_scale: float, ring: HostRing
    ) -> Record | None:
        """Update a chunk as ``update`` does, but leave the shards as they are.

        Returns:
            None if the ring has no room: then nothing was updated.
        """

    def round_to(self, start: int, stop: int, out: Tensor) -> None:
        """Write the rounded values of a range inside one shard to ``out``, as an update does."""


_MOST_BUFFERS = 6
"""Of an element: a split master weight, and two moments of 8 bits with their scales."""


def undo_capacity(geometry: Geometry, num_bytes: int) -> int:
    """Return the bytes of a ring for records of all of a flat space.

    Args:
        geometry: its pieces and shards, which bound the number of records.
        num_bytes: of master weights and states, with shards that are master weights or halves.
    """
    num_spans = len(geometry.pieces) + len(geometry.shards)
    num_spans += geometry.numel // geometry.published_numel
    return aligned(num_bytes) + ALIGNMENT * _MOST_BUFFERS * num_spans


class UndoLog:
    """Records of the tentative updates of one tier. The thread that updates uses it.

    If an update finds a record of its elements, that record is to be undone: the step before has
    been published, and its record dropped.

    Attributes:
        num_kept: elements whose tentative updates were kept so far.
        num_undone: elements whose tentative updates were undone so far.
    """

    def __init__(self, stepper: UndoableStepper, ring: HostRing) -> None:
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
        spans = [(run.start, run.stop) for run in chunk.runs]
        found = [record for span in spans for *_, record in self._records.overlaps(*span)]
        return list(dict.fromkeys(found))

    def _drop(self, record: Record) -> int:
        """Forget a record and return its number of elements. Its copies stay for the moment."""
        for run in record.chunk.runs:
            self._records.discard(run.start, run.stop)
        self._ring.free(record.span)
        return sum(run.stop - run.start for run in record.chunk.runs)
