"""Micro-batches whose forwards run on threads of their own, one at a time, and pause at blocks.

The forward of a model is a stack of Python frames that only the model's own code can build, so it
can stop at the border of a block and go on later only on a thread. At any time at most one of
these threads runs, while its starter waits: nothing runs in parallel.
"""

from __future__ import annotations

import threading
from contextvars import copy_context
from typing import Any

import torch
from torch import Tensor

from zero_core.step.micro_batches import ScaledLoss
from zero_core.vertical.partial_grads import PartialGrads
from zero_core.vertical.segments import Segments


class ForwardAbandoned(BaseException):
    """Stops a micro-batch's forward, in its thread, after another micro-batch failed."""


class MicroBatch:
    """One micro-batch."""

    def __init__(
        self,
        number: int,
        batch: Any,
        loss_of: ScaledLoss,
        device: torch.device,
        partial: PartialGrads,
    ) -> None:
        """Prepare. The thread enqueues as the caller does on ``device``."""
        self.number = number  # in the step, from 0 on
        self.segments = Segments(partial)  # its graph
        self.next_block = 0  # number of the block that its forward is about to enter
        self.states: tuple[Tensor, ...] | None = None  # of random generators, between turns
        self.results: tuple[Tensor, Tensor] | None = None  # loss and scaled loss
        self.is_done = False  # whether its forward has ended
        self._batch = batch
        self._loss_of = loss_of
        self._device = device
        self._thread: threading.Thread | None = None
        self._go = threading.Semaphore(0)
        self._paused = threading.Semaphore(0)
        self._is_abandoned = False
        self._error: BaseException | None = None

    def _compute(self) -> None:
        loss, scaled = self._loss_of(self._batch)
        self.segments.close([scaled])
        self.results = loss.detach(), scaled
        self._batch = None

    def take_scaled_loss(self) -> Tensor:
        assert self.results is not None
        loss, scaled = self.results
        self.results = loss, loss
        return scaled

    def advance(self) -> None:
        """Run until the next `pause` or the end. What the forward raises is raised here."""
        if self._thread is not None:
            self._go.release()
        else:
            context = copy_context()
            is_accelerated = self._device.type != "cpu"
            stream = torch.accelerator.current_stream(self._device) if is_accelerated else None

            def run() -> None:
                try:
                    if stream is not None:
                        torch.accelerator.set_stream(stream)  # and its device
                    context.run(self._compute)
                except BaseException as error:  # raised below
                    self._error = error
                self.is_done = True
                self._paused.release()

            name = f"zero_core micro-batch {self.number}"
            self._thread = threading.Thread(target=run, name=name, daemon=True)
            self._thread.start()
        self._paused.acquire()
        if self.is_done:
            self._thread.join()
            error, self._error = self._error, None
            if error is not None:
                raise error

    def pause(self) -> None:
        """End the turn, on the thread. Returns when the next one begins."""
        self._paused.release()
        self._go.acquire()
        if self._is_abandoned:
            raise ForwardAbandoned

    def abandon(self) -> None:
        """End the forward where it pauses, and wait for that."""
        if self._thread is not None and self._thread.ident is not None and not self.is_done:
            self._is_abandoned = True
            self._go.release()
            self._thread.join()
        self._error = None
