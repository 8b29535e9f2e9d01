"""Asynchronous copies to the compute device."""

from __future__ import annotations

import torch
from torch import Tensor


class Copy:
    """A copy enqueued on the stream that was current then. See `start_copy`."""

    def __init__(self, out: Tensor) -> None:
        self._device = out.device
        self._event: torch.Event | None = None
        if self._device.type != "cpu":
            self._event = torch.accelerator.current_stream(self._device).record_event()

    def wait(self) -> None:
        """Make the current stream wait for the copy. On a CPU it is complete already."""
        if self._event is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._event)

    def block(self) -> None:
        """Block this thread until the source may be overwritten."""
        if self._event is not None:
            self._event.synchronize()


def start_copy(out: Tensor, source: Tensor) -> Copy:
    """Enqueue ``out.copy_(source)`` on the current stream. ``source`` is on the host."""
    out.copy_(source, non_blocking=True)
    return Copy(out)
