"""The tier over one kind of memory: a stepper, a mover, and who runs the step.

`HostTier` keeps master weights and state in host memory and updates them in a worker thread;
`DeviceTier` keeps them on the compute device and updates them in the caller's. All else, and above
all the meaning of each call, is the same code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from zero_offload.geometry import PUBLISHED_NUMEL, Geometry, check_active, freeze_groups
from zero_offload.grads import GradLedger
from zero_offload.progress import Progress
from zero_offload.stepper import MASTER, Chunk, Stepper
from zero_offload.storage import BlockFile
from zero_offload.transfer import Mover

__all__ = ["DeviceTier", "FlatTier", "HostTier"]


class FlatTier(ABC):
    """A StateTier whose master weights and state lie in flat buffers of one memory.

    Reading and writing state first waits for the steps under way; a gradient may be offered as soon
    as the last one of its range was used. After a step that failed in the background every call
    raises `OffloadError`.
    """

    def __init__(self, geometry: Geometry, stepper: Stepper, mover: Mover) -> None:
        self.geometry = geometry
        self._stepper = stepper
        self._mover = mover
        self._grads = GradLedger()
        self._progress = Progress()
        self._seconds = 0.0
        self.stall_s = 0.0
        """Seconds that callers were blocked so far because a step was not done."""

    @abstractmethod
    def _launch(self, job: Callable[[], None]) -> None:
        """Run the step's work, now or in the background."""

    @property
    def bytes_d2h(self) -> int:
        """Gradient bytes copied to the host so far."""
        return self._mover.bytes_d2h

    @property
    def bytes_h2d(self) -> int:
        """Parameter bytes brought back to the compute device so far."""
        return self._mover.bytes_h2d

    @property
    def seconds(self) -> float:
        """Seconds spent on updates so far, without waiting for gradients; waits for a step."""
        self._progress.drain()
        return self._seconds

    @property
    def file(self) -> BlockFile | None:
        """Where master weights and state lie if not in memory, with its counters."""
        return self._stepper.file

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that master weights and state take, transfer buffers apart.

        An upper half that is the parameter shard itself, or the copy that is sent up, counts.
        """
        stepper = self._stepper
        is_on_host = stepper.device.type == "cpu"
        return stepper.master_bytes + stepper.state_bytes if is_on_host else 0

    def offer_grad(self, start: int, grad: Tensor) -> Callable[[], None] | None:
        """Take the gradient of ``[start, start + grad.numel())`` for a step to come.

        Args:
            start: offset in the flat space, in elements.
            grad: 1-D, contiguous, floating point, on the compute device. `HostTier` copies it,
                `DeviceTier` uses it where it lies until ``step`` or ``discard_grads`` returns. A
                later offer of the same range replaces it.

        Returns:
            None, or what the caller must call before it writes to the memory of ``grad`` again.
        """
        if grad.dim() != 1 or not grad.is_contiguous() or not grad.is_floating_point():
            raise ValueError(
                f"a gradient must be 1-D, contiguous and floating point; got {grad.dtype} of "
                f"shape {tuple(grad.shape)} at {start}"
            )
        stop = start + grad.numel()
        self.geometry.check_range(start, stop)
        self._wait(start, stop)  # a step may still read the last gradient of this range
        return self._mover.offer(start, grad, self._grads)

    def read_grad(self, start: int, stop: int) -> Tensor:
        """A copy of what is offered for ``[start, stop)``: 1-D, on the CPU, in its dtype.

        Raises:
            ValueError: a part of it was not offered, or was used by a step.
        """
        self.geometry.check_range(start, stop)
        self._mover.close_grads()()
        parts = self._grads.segments(start, stop)
        return torch.cat([part.cpu() for _, _, part in parts]) if parts else torch.empty(0)

    def discard_grads(self) -> None:
        """Forget what was offered and no step has taken."""
        self._progress.check()
        self._mover.close_grads()
        self._grads = GradLedger()

    def step(
        self, groups: Sequence[Mapping[str, Any]], active: Sequence[int], *, grad_scale: float
    ) -> None:
        """Update the pieces in ``active`` with the offered gradients times ``grad_scale``.

        Settings are copied, so that a scheduler may change ``groups`` right after. What can be
        refused is refused before anything is updated. The gradients used are no longer offered;
        others stay, for a further step over other pieces.

        Raises:
            ValueError: ``active`` is not sorted or names no piece, or a gradient is missing.
        """
        self._progress.check()
        indices = check_active(self.geometry, active)
        if not indices:
            return
        chunks = self._stepper.plan(indices, freeze_groups(groups), self._grads)
        self._stepper.count(indices)
        spans = [(run.start, run.stop) for chunk in chunks for run in chunk.runs]
        grads = self._grads.take(spans)
        wait_for_grads = self._mover.close_grads()
        self._mover.open_params()
        self._progress.begin(spans)
        self._launch(partial(self._run, chunks, grads, grad_scale, wait_for_grads))

    def _run(
        self,
        chunks: list[Chunk],
        grads: GradLedger,
        grad_scale: float,
        wait_for_grads: Callable[[], None],
    ) -> None:
        """The step itself. Grad mode is per thread, so it is set here."""
        if self._progress.has_failed:
            return
        try:
            with torch.no_grad():
                wait_for_grads()
                started = perf_counter()
                for chunk in chunks:
                    self._mover.open_spans([(run.start, run.stop) for run in chunk.runs])
                    self._stepper.update(chunk, grads, grad_scale, self._mover.out)
                    for run in chunk.runs:
                        self._progress.advance(self._mover.publish(run.start, run.stop))
                self._stepper.settle()
                self._seconds += perf_counter() - started
        except BaseException as error:
            self._progress.fail(error)  # whatever it was, the next call must hear of it
            raise
        self._progress.finish()

    def wait_params(self, start: int, stop: int) -> None:
        """Return once the parameter shards in ``[start, stop)`` hold their new values.

        On an accelerator: once the current stream is ordered after their arrival.
        """
        for event in self._wait(start, stop):
            self._mover.arrive(event)

    def _wait(self, start: int, stop: int) -> list[torch.Event]:
        started = perf_counter()
        events = self._progress.wait(start, stop)
        self.stall_s += perf_counter() - started
        return events

    def are_params_ready(self, start: int, stop: int) -> bool:
        """Whether `wait_params` would return at once, and make no stream wait."""
        return self._progress.is_over(start, stop)

    def state_names(self) -> Sequence[str]:
        """``master_weight``, then every elementwise state that the optimizer has."""
        return (MASTER, *self._stepper.state_dtypes())

    def _check_name(self, name: str) -> None:
        known = self._stepper.state_dtypes()
        if name not in known:
            raise KeyError(f"the optimizer has no state {name!r}, only {[MASTER, *known]}")

    def read_state(self, name: str, start: int, stop: int) -> Tensor:
        """A copy of one state over ``[start, stop)``: 1-D, on the CPU, zero where there is none.

        Raises:
            KeyError: the optimizer has no such state.
        """
        self._progress.drain()
        self.geometry.check_range(start, stop)
        if name == MASTER:
            return self._stepper.read_master(start, stop)
        self._check_name(name)
        return self._stepper.read(name, start, stop)

    def write_state(self, name: str, start: int, values: Tensor) -> None:
        """Overwrite one state; ``master_weight`` is rounded into the parameter shards as well.

        Args:
            name: one of `state_names`; KeyError otherwise.
            start: offset in the flat space, in elements.
            values: 1-D, any device, cast to the stored dtype.
        """
        self._progress.drain()
        stop = start + values.numel()
        self.geometry.check_range(start, stop)
        if name == MASTER:
            with torch.no_grad():
                self._stepper.write_master(start, values)
                self._publish_master(start, stop)
            return
        self._check_name(name)
        with torch.no_grad():
            self._stepper.write(name, start, values)

    def _publish_master(self, start: int, stop: int) -> None:
        self._mover.open_params()
        for low, high, _ in self.geometry.overlaps(start, stop):
            for a in range(low, high, PUBLISHED_NUMEL):
                self._publish_span(a, min(a + PUBLISHED_NUMEL, high))

    def _publish_span(self, start: int, stop: int) -> None:
        self._mover.open_spans([(start, stop)])
        if not self._stepper.is_in_place:
            self._mover.out(start, stop).copy_(self._stepper.master(start, stop))
        event = self._mover.publish(start, stop)
        if event is not None:
            self._mover.arrive(event)

    def read_scalars(self, piece: int) -> Mapping[str, float]:
        """``num_steps`` (updates applied to the piece) and the optimizer's own scalars."""
        self._progress.drain()
        return self._stepper.read_scalars(piece)

    def write_scalars(self, piece: int, scalars: Mapping[str, float]) -> None:
        """Restore what `read_scalars` gave; ``num_steps`` of 0 clears the piece's state.

        Raises:
            ValueError: ``num_steps`` is missing, or the scalars are another optimizer's.
        """
        self._progress.drain()
        self._stepper.write_scalars(piece, scalars)


class HostTier(FlatTier):
    """Master weights and state in host memory, updated in one background thread.

    ``step`` returns at once, and may be called again before the last one is done: steps queue up.
    Each publishes its parameters run by run, in ascending order.

    Args:
        geometry: the flat space.
        stepper: owns master weights and state.
        mover: brings gradients and parameters.
        initializer: what the thread does first, such as binding itself to a NUMA node.
    """

    def __init__(
        self,
        geometry: Geometry,
        stepper: Stepper,
        mover: Mover,
        *,
        initializer: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(geometry, stepper, mover)
        self._worker = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="zero-offload", initializer=initializer
        )

    def _launch(self, job: Callable[[], None]) -> None:
        try:
            self._worker.submit(job)
        except RuntimeError as error:  # no thread can be started: the interpreter is closing
            self._progress.fail(error)
            raise


class DeviceTier(FlatTier):
    """Master weights and state on the compute device, updated in the caller's thread."""

    def _launch(self, job: Callable[[], None]) -> None:
        job()
