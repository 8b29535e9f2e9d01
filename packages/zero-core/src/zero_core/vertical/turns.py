"""Functions that run on threads of their own, one at a time, and pause where they are asked to.

The forward of a model is a stack of Python frames that only the model's own code can build, so it
can stop at the border of a block and go on later only on a thread. At any time at most one of
these threads runs, while its starter waits: nothing runs in parallel.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from contextvars import copy_context

import torch


class ForwardAbandoned(BaseException):
    """Stops a micro-batch's forward, in its thread, after another micro-batch failed."""


class Turns(ABC):
    """A computation in turns.

    Attributes:
        is_done: whether `compute` has returned.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        """Prepare. The thread is called ``name`` and enqueues as the caller does on ``device``."""
        self.is_done = False
        self._name = name
        self._device = device
        self._thread: threading.Thread | None = None
        self._go = threading.Semaphore(0)
        self._paused = threading.Semaphore(0)
        self._is_abandoned = False
        self._error: BaseException | None = None

    @abstractmethod
    def compute(self) -> None:
        """Compute on the thread, and call `pause` in between."""

    def advance(self) -> None:
        """Run until the next `pause` or the end. What `compute` raises is raised here."""
        if self._thread is None:
            self._start()
        else:
            self._go.release()
        self._paused.acquire()
        if self.is_done and self._thread is not None:
            self._thread.join()
            error, self._error = self._error, None
            if error is not None:
                raise error

    def pause(self) -> None:
        """End the turn, on the thread. Returns when the next one begins.

        Raises:
            ForwardAbandoned: there is none.
        """
        self._paused.release()
        self._go.acquire()
        if self._is_abandoned:
            raise ForwardAbandoned

    def abandon(self) -> None:
        """End the computation where it pauses, and wait for that."""
        if self._thread is not None and self._thread.ident is not None and not self.is_done:
            self._is_abandoned = True
            self._go.release()
            self._thread.join()
        self._error = None

    def _start(self) -> None:
        context = copy_context()
        device, is_accelerated = self._device, self._device.type != "cpu"
        stream = torch.accelerator.current_stream(device) if is_accelerated else None

        def run() -> None:
            try:
                if stream is not None:
                    torch.accelerator.set_stream(stream)  # and its device
                context.run(self.compute)
            except BaseException as error:  # raised by `advance`
                self._error = error
            self.is_done = True
            self._paused.release()

        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()
