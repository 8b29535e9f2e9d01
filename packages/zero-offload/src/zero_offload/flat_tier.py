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
from typing import Any

import torch
from torch import Tensor

from zero_offload.geometry import Geometry, check_active, freeze_groups
from zero_offload.grads import GradLedger
from zero_offload.progress import Progress
from zero_offload.stepper import MASTER, Chunk, Stepper
from zero_offload.storage import BlockFile
from zero_offload.transfer import Mover

__all__ = ["DeviceTier", "FlatTier", "HostTier"]


class FlatTier(ABC):
    """A StateTier whose master weights and state lie in flat buffers of one memory.

    Every call but `wait_params` first waits for a step under way. After a step that failed in the
    background every call raises `OffloadError`.
    """

    def __init__(self, geometry: Geometry, stepper: Stepper, mover: Mover) -> None:
        self.geometry = geometry
        self._stepper = stepper
        self._mover = mover
        self._grads = GradLedger()
        self._progress = Progress()

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

    def offer_grad(self, start: int, grad: Tensor) -> None:
        """Take the gradient of ``[start, start + grad.numel())`` for the coming step.

        Args:
            start: offset in the flat space, in elements.
            grad: 1-D, contiguous, floating point, on the compute device; unchanged until ``step``
                or ``discard_grads`` returns. A later offer of the same range replaces it.
        """
        self._progress.drain()
        if grad.dim() != 1 or not grad.is_contiguous() or not grad.is_floating_point():
            raise ValueError(
                f"a gradient must be 1-D, contiguous and floating point; got {grad.dtype} of "
                f"shape {tuple(grad.shape)} at {start}"
            )
        stop = start + grad.numel()
        self.geometry.check_range(start, stop)
        source, base = self._mover.offer(start, grad)
        self._grads.add(start, stop, source, base)

    def discard_grads(self) -> None:
        """Forget what was offered: the step is skipped."""
        self._progress.drain()
        self._mover.close_grads()
        self._grads = GradLedger()

    def step(
        self, groups: Sequence[Mapping[str, Any]], active: Sequence[int], *, grad_scale: float
    ) -> None:
        """Update the pieces in ``active`` with the offered gradients times ``grad_scale``.

        Settings are copied, so that a scheduler may change ``groups`` right after. What can be
        refused is refused before anything is updated.

        Raises:
            ValueError: ``active`` is not sorted or names no piece, or a gradient is missing.
        """
        self._progress.drain()
        indices = check_active(self.geometry, active)
        grads = self._grads
        chunks = self._stepper.plan(indices, freeze_groups(groups), grads)
        self._grads = GradLedger()
        self._mover.close_grads()
        self._mover.open_params()
        self._progress.begin([(run.start, run.stop) for chunk in chunks for run in chunk.runs])
        self._launch(partial(self._run, chunks, indices, grads, grad_scale))

    def _run(
        self, chunks: list[Chunk], active: Sequence[int], grads: GradLedger, grad_scale: float
    ) -> None:
        """The step itself. Grad mode is per thread, so it is set here."""
        try:
            with torch.no_grad():
                self._mover.begin()
                for chunk in chunks:
                    self._stepper.update(chunk, grads, grad_scale, self._mover.out)
                    for run in chunk.runs:
                        self._progress.advance(self._mover.publish(run.start, run.stop))
                self._stepper.settle()
                self._stepper.count(active)
        except BaseException as error:
            self._progress.fail(error)  # whatever it was, the next call must hear of it
            raise
        self._progress.finish()

    def wait_params(self, start: int, stop: int) -> None:
        """Return once the parameter shards in ``[start, stop)`` hold their new values.

        On an accelerator: once the current stream is ordered after their arrival.
        """
        for event in self._progress.wait(start, stop):
            self._mover.arrive(event)

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
        self._mover.begin()
        for a, b, _ in self.geometry.overlaps(start, stop):
            if not self._stepper.is_in_place:
                self._mover.out(a, b).copy_(self._stepper.master(a, b))
            event = self._mover.publish(a, b)
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

    ``step`` returns at once; parameters are published run by run, in ascending order.
    """

    def __init__(self, geometry: Geometry, stepper: Stepper, mover: Mover) -> None:
        super().__init__(geometry, stepper, mover)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="zero-offload")

    def _launch(self, job: Callable[[], None]) -> None:
        try:
            self._worker.submit(job)
        except RuntimeError as error:  # no thread can be started: the interpreter is closing
            self._progress.fail(error)
            raise


class DeviceTier(FlatTier):
    """Master weights and state on the compute device, updated in the caller's thread."""

    def __init__(self, geometry: Geometry, stepper: Stepper, mover: Mover) -> None:
        super().__init__(geometry, stepper, mover)

    def _launch(self, job: Callable[[], None]) -> None:
        job()
