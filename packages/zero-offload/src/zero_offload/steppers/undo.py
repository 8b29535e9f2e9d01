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

from zero_offload.flat.grads import GradLedger
from zero_offload.flat.intervals import SpanMap
from zero_offload.memory.ring import HostRing
from zero_offload.steppers.memory_stepper import MemoryStepper, Record
from zero_offload.steppers.stepper import Chunk, SpanMemory, spans_of


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
