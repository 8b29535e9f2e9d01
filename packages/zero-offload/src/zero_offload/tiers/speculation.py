"""Updates of a host tier ahead of their step's decision.

[Note: speculation]
`SpeculativeHostTier.speculate` begins a step before it is decided. Only the thread that updates
sees it. ``step`` with the same settings and factor goes on with it. Anything else (another factor,
a gradient that is replaced or dropped, a state that is read or written) undoes it first.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zero_offload.flat.geometry import check_active, freeze_groups
from zero_offload.flat.grads import GradLedger
from zero_offload.memory.ring import HostRing
from zero_offload.protocols import Groups
from zero_offload.steppers.memory_stepper import MemoryStepper
from zero_offload.steppers.stepper import spans_of
from zero_offload.steppers.undo import UndoLog
from zero_offload.tiers.flat_tier import HostTier
from zero_offload.tiers.worker import Job, Phase, Speculation
from zero_offload.transfers.mover import Release


class SpeculativeHostTier(HostTier):
    """`HostTier` that can begin a step before it is decided, once it has an undo log."""

    _speculation: Speculation | None = None

    def enable_undo(self, most_bytes: int | None) -> bool:
        """Prepare for `speculate`, with an undo log of at most ``most_bytes``, None for no limit.

        Return whether this tier's updates can be undone: those of a kernel, in host memory.
        """
        stepper = self._stepper
        if not isinstance(stepper, MemoryStepper):
            return False
        capacity = stepper.undo_capacity()
        if most_bytes is not None:
            capacity = min(capacity, most_bytes)
        self.worker.log = UndoLog(stepper, HostRing(capacity))
        self.mover.add_staging()
        return True

    def speculate(self, groups: Groups, active: Sequence[int], *, grad_scale: float) -> None:
        """Begin a step over the pieces ``active`` before it is decided. See [Note: speculation].

        It may be called several times before ``step``, each time for other pieces.
        """
        if self.worker.log is None:
            raise RuntimeError("speculate without enable_undo: call that once before")
        self._progress.check()
        indices, frozen = check_active(self.geometry, active), freeze_groups(groups)
        if not indices:
            return
        # It may refuse: before there is a speculation, which must have chunks.
        chunks = self._stepper.plan(indices, frozen, self._grads)
        spans = spans_of(chunks)
        for span in spans:
            self._sums.settle(*span)
        if self._speculation is not None and not self._speculation.is_of(frozen, grad_scale):
            self._undo()
        if self._speculation is None:
            self._speculation = Speculation(frozen, grad_scale, self._thread.changed)
        speculation = self._speculation
        with self._progress.launching():
            before = self._progress.begin_unpublished(spans)
            speculation.pieces.update(indices)
            speculation.chunks += chunks
            grads, arrivals = self._grads.copy(spans), self._arrivals(chunks)
            job = Job(Phase.TENTATIVE, chunks, grads, grad_scale, arrivals, before)
            job.speculation = speculation
            self._thread.submit(self.worker, job)

    def step(self, groups: Groups, active: Sequence[int], *, grad_scale: float) -> None:
        """Update the pieces in ``active``, as `FlatTier.step`. See [Note: speculation]."""
        speculation = self._speculation
        rest = active
        if speculation is not None:
            rest = [i for i in active if i not in speculation.pieces]
            is_covered = len(rest) + len(speculation.pieces) == len(active)
            if not is_covered or not speculation.is_of(freeze_groups(groups), grad_scale):
                self._undo()
                speculation, rest = None, active
        super().step(groups, rest, grad_scale=grad_scale)
        if speculation is None:
            return
        with self._progress.launching():
            self._speculation = None
            speculation.end()
            self._stepper.count(sorted(speculation.pieces))
            chunks = sorted(speculation.chunks, key=lambda chunk: chunk.runs[0].start)
            self._enqueue(Phase.KEEP, chunks, self._take(spans_of(chunks)), grad_scale)

    def _undo(self) -> None:
        """End the speculation, if there is one, and restore states in the background."""
        speculation = self._speculation
        if speculation is None:
            return
        speculation.end()
        speculation.wait()  # Ctrl-C may break it off: then the next call undoes
        chunks = speculation.chunks
        with self._progress.launching():
            before = self._progress.begin_unpublished(())
            none, scale = [None] * len(chunks), speculation.grad_scale
            job = Job(Phase.UNDO, chunks, GradLedger(), scale, none, before)
            self._thread.submit(self.worker, job)
            self._speculation = None

    def _undo_within(self, start: int, stop: int) -> None:
        """Undo the speculation if it reads a gradient of ``[start, stop)``."""
        if self._speculation is not None:
            spans = spans_of(self._speculation.chunks)
            if any(a < stop and start < b for a, b in spans):
                self._undo()

    def _settle(self) -> None:
        self._undo()
        super()._settle()

    def offer_grad(self, start: int, grad: Tensor) -> Release | None:
        self._undo_within(start, start + grad.numel())
        return super().offer_grad(start, grad)

    def _admit(self, start: int, grad: Tensor) -> None:
        self._undo_within(start, start + grad.numel())
        super()._admit(start, grad)

    def drop_grads(self, start: int, stop: int) -> None:
        self._undo_within(start, stop)
        super().drop_grads(start, stop)

    def discard_grads(self) -> None:
        self._undo()
        super().discard_grads()
