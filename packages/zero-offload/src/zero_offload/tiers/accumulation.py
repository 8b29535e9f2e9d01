"""Gradients of the micro-steps of one step, added up in host memory.

[Note: layers]
layer    host memory over the whole space in which one micro-step's gradient lands in its own dtype
sum      host memory over the whole space in the master weights' dtype
folded   a range whose terms have been added to the sum. It is then the first term, and the layers
         are free again.

A step of few micro-steps has one layer for each, and the update adds them in its own pass: nothing
else reads or writes them. More than `SEPARATE_BYTES` per element are not spent on that: then there
is one layer, which is folded in a background thread while the next micro-step computes. The last
micro-step's gradient is left for the update in any case. An element's terms are added in the dtype
of the sum, in the order in which they came, so both ways give the same bits.

The caller waits for square sums at the end of backward. So they go before updates: a chunk of an
update begins when those of all gradients that arrived are done.
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
    """Return how many layers gradients of ``dtype`` take, and whether there is a sum."""
    if num_micro_steps * dtype.itemsize <= max(SEPARATE_BYTES, dtype.itemsize):
        return num_micro_steps, False
    return 1, True


class GradSums:
    """Adds up a host tier's gradients. See [Note: layers]."""

    def __init__(self, mover: HostMover, stepper: Stepper) -> None:
        self._mover = mover
        self._stepper = stepper
        self.num_micro_steps = 1
        self._folds: SpanMap[Future[None]] = SpanMap()  # over folded ranges
        self._running: set[Future[Any]] = set()
        self._executor = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="zero-offload-sums",
            initializer=enter_device,
            initargs=(with_index(mover.device),),
        )

    def reserve(self, dtypes: Collection[torch.dtype]) -> None:
        """Allocate layers and sums for gradients of these dtypes."""
        for dtype in dtypes:
            layers, has_sum = num_layers(self.num_micro_steps, self._mover.kept_dtype(dtype))
            self._mover.reserve(dtype, layers, has_sum=has_sum)

    def add(self, start: int, grad: Tensor, ledger: GradLedger, *, is_last: bool) -> Release | None:
        """Start to copy one more term of a range to a free layer. Returns a release, or None."""
        layers, has_sum = num_layers(self.num_micro_steps, self._mover.kept_dtype(grad.dtype))
        stop, release = start + grad.numel(), None
        for a, b, terms in ledger.terms(start, stop):
            if not terms:
                self._folds.discard(a, b)
            layer = len(terms) - any(True for _ in self._folds.overlaps(a, b))
            if layer >= layers:  # more micro-steps than were expected
                self._fold(a, b, ledger)
                layer = 0
            self.settle(a, b)  # a fold under way still reads the layers
            release = self._mover.append(a, grad[a - start : b - start], ledger, layer) or release
        if has_sum and not is_last:
            self._fold(start, stop, ledger)
        return release

    def _fold(self, start: int, stop: int, ledger: GradLedger) -> None:
        """Start to add the terms of a range to the sum. It is the only term from now on."""
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
        """Start to compute the sum of the squares of a range's gradient, in double precision."""
        parts, square_sum = ledger.segments(start, stop), self._stepper.square_sum
        future = self._submit(lambda: sum(square_sum(terms) for _, _, terms in parts))
        self._mover.note_read(future)
        return future

    def _submit(self, job: Callable[[], T]) -> Future[T]:
        """Have the thread do a job once all gradients that were offered have arrived."""
        arrived, streams = self._mover.arrived, self._mover.streams

        def run() -> T:
            if arrived is not None:
                streams.wait(arrived)
            return job()

        future = self._executor.submit(run)
        self._running = {f for f in self._running if not f.done()} | {future}
        return future

    def replaced(self, start: int, stop: int) -> None:
        """Forget that a range is folded, and wait until its memory is not in use."""
        wait(self._running)
        self._folds.discard(start, stop)

    def settle(self, start: int, stop: int) -> None:
        """Wait until the sums of a range are in memory."""
        for *_, fold in self._folds.overlaps(start, stop):
            fold.result()

    def close(self) -> None:
        """Wait as `replaced`, and start a new step."""
        wait(self._running)
        self._folds = SpanMap()
