"""Private byte buffers that are reused, safely when work is queued on device streams.

[Note: streams]
On an accelerator, giving a buffer back means only that its last reader is queued. The buffer
carries an event of that moment, and whoever takes it next makes their stream wait for the event;
the host never does. A collective is taken to start after what its caller's stream has queued, as
torch.distributed does it. On a CPU there's no event: work is done when the call returns.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["BufferPool", "follow", "mark"]


def mark(device: torch.device) -> torch.Event | None:
    """Record an event on the current stream of ``device``; None on a CPU."""
    if device.type == "cpu":
        return None
    return torch.accelerator.current_stream(device).record_event()


def follow(event: torch.Event | None, device: torch.device) -> None:
    """Let the current stream of ``device`` wait for ``event``, if there is one."""
    if event is not None:
        torch.accelerator.current_stream(device).wait_event(event)


class BufferPool:
    """Byte buffers of one device, each out to one user at a time.

    A request is served by the smallest free buffer that is large enough. If none is, the largest
    free one is let go and a new one made, so that the pool settles at as many buffers as are out
    at once, each no larger than the largest request.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[tuple[Tensor, torch.Event | None]] = []

    def take(self, nbytes: int) -> Tensor:
        """A uint8 buffer of at least ``nbytes``, contents undefined; the caller slices it."""
        fitting = [i for i, (buffer, _) in enumerate(self._free) if buffer.numel() >= nbytes]
        if fitting:
            smallest = min(fitting, key=lambda i: self._free[i][0].numel())
            buffer, event = self._free.pop(smallest)
            follow(event, self._device)
            return buffer
        if self._free:
            largest = max(range(len(self._free)), key=lambda i: self._free[i][0].numel())
            # The allocator reuses memory in stream order, which the event stands outside of.
            follow(self._free.pop(largest)[1], self._device)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def give(self, buffer: Tensor, event: torch.Event | None) -> None:
        """Return what `take` gave, with the event after which it may be overwritten."""
        self._free.append((buffer, event))

    @property
    def free_nbytes(self) -> int:
        """Bytes held in free buffers."""
        return sum(buffer.numel() for buffer, _ in self._free)
