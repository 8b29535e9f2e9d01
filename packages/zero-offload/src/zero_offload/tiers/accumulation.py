"""Sums of the micro-steps' gradients in host memory.

[Note: layers]
layer   host memory over the flat space for one micro-step's gradient, in the gradient's dtype.
sum     host memory over the flat space in the master weights' dtype.
folded  range whose terms were added to the sum. The sum is then its first term.

With few micro-steps, each has its own layer, and the update adds them in its own pass. If this
takes more than `SEPARATE_BYTES` per element, there is one layer. A background thread folds it while
the next micro-step computes. The update always adds the last micro-step's gradient. Terms are added
in order in the dtype of the sum, so both methods give the same bits.

The caller waits for square sums at the end of backward. A chunk's update therefore waits for the
square sums of all gradients that have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
from torch import Tensor

from zero_offload.flat.geometry import SpanMap
from zero_offload.flat.grads import GradLedger, add_up
from zero_offload.memory.streams import enter_device, with_index
from zero_offload.steppers.stepper import Stepper
from zero_offload.transfers.mover import HostMover, Release

SEPARATE_BYTES = 8
"""Maximum bytes per element for layers: four of 16 bits."""

T = TypeVar("T")


def num_layers(num_micro_steps: int, dtype: torch.dtype) -> tuple[int, bool]:
    """Return the number of layers for gradients of ``dtype``, and whether there is a sum."""
    if num_micro_steps * dtype.itemsize <= max(SEPARATE_BYTES, dtype.itemsize):
        return num_micro_steps, False
    return 1, True


class GradSums:
    """Adds up a host tier's gradients. See [Note: layers]."""

    def __init__(self, mover: HostMover, stepper: Stepper) -> None:
        self._mover = mover
        self._stepper = stepper
        self.num_micro_steps = 1
        self._folds: SpanMap[Future[None]] = SpanMap()  # jobs of folded ranges
        self._running: set[Future[Any]] = set()
        self._executor = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="zero-offload-sums",
            initializer=enter_device,
            initargs=(with_index(mover.device),),
        )

    def reserve(self, dtypes: Collection[torch.dtype]) -> None:
        for dtype in dtypes:
            layers, has_sum = num_layers(self.num_micro_steps, self._mover.kept_dtype(dtype))
            self._mover.reserve(dtype, layers, has_sum=has_sum)

    def add(self, start: int, grad: Tensor, ledger: GradLedger, *, is_last: bool) -> Release | None:
        """Start to copy one more term to a free layer. Return a release, or None."""
        layers, has_sum = num_layers(self.num_micro_steps, self._mover.kept_dtype(grad.dtype))
        stop, release = start + grad.numel(), None
        for a, b, terms in ledger.terms(start, stop):
            if not terms:
                self._folds.discard(a, b)
            layer = len(terms) - any(True for _ in self._folds.overlaps(a, b))
            if layer >= layers:  # There are more micro-steps than expected.
                self._fold(a, b, ledger)
                layer = 0
            self.settle(a, b)  # A pending fold still reads the layers.
            release = self._mover.append(a, grad[a - start : b - start], ledger, layer) or release
        if has_sum and not is_last:
            self._fold(start, stop, ledger)
        return release

    def _fold(self, start: int, stop: int, ledger: GradLedger) -> None:
        """Start to add a range's terms to the sum, which becomes its only term."""
        jobs: list[tuple[int, Tensor, list[tuple[int, int, list[Tensor]]]]] = []
        for a, b, (base, total) in self._mover.sums().overlaps(start, stop):
            jobs.append((a, total[a - base : b - base], ledger.segments(a, b)))
            ledger.add(a, b, total, base)

        def fold() -> None:
            for at, total, parts in jobs:
                for a, b, terms in parts:
                    add_up(terms, total[a - at : b - at])

        self._folds.put(start, stop, self._submit(fold))

    def square_sum(self, start: int, stop: int, ledger: GradLedger) -> Future[float]:
        parts, square_sum = ledger.segments(start, stop), self._stepper.square_sum
        future = self._submit(lambda: sum(square_sum(terms) for _, _, terms in parts))
        self._mover.note_read(future)
        return future

    def _submit(self, job: Callable[[], T]) -> Future[T]:
        """Run a job in the thread after all gradients offered so far have arrived."""
        arrived, streams = self._mover.arrived, self._mover.streams

        def run() -> T:
            if arrived is not None:
                streams.wait(arrived)
            return job()

        future = self._executor.submit(run)
        self._running = {f for f in self._running if not f.done()} | {future}
        return future

    def replaced(self, start: int, stop: int) -> None:
        """Mark a range as not folded, and wait until no job reads its memory."""
        wait(self._running)
        self._folds.discard(start, stop)

    def settle(self, start: int, stop: int) -> None:
        for *_, fold in self._folds.overlaps(start, stop):
            fold.result()

    def close(self) -> None:
        """Wait for all jobs and start a new step."""
        wait(self._running)
        self._folds = SpanMap()
