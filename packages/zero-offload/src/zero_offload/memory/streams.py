"""Copies between the compute device and host memory, and their order.

[Note: order of the streams]
Three queues work at once on an accelerator: the caller's current stream (forward, backward, the
device's half of the step), the *down* stream (gradients to the host) and the *up* stream
(parameters to the device); the host's worker thread is a fourth actor.

1. down waits for the caller's stream: a gradient is read after it was computed.
2. the worker waits for down: the host reads a gradient after it arrived.
3. the caller's stream waits for down (`release`): the caller may overwrite a gradient once it has
   called for that.
4. up waits for the caller's stream (`open_targets`): a parameter is overwritten after the forward
   and backward that were enqueued before ``step`` have read it.
5. the worker waits for up: a staging buffer is refilled after it was sent.
6. the caller's stream waits for up (`arrive`): a parameter is read after its new value is there.

If the compute device is the CPU, each of them is a plain copy and no order is needed beyond that of
the calls. Nothing here names CUDA: streams and events are ``torch.accelerator``'s.
"""

from __future__ import annotations

import torch
from torch import Tensor


class HostStreams:
    """Copies on a CPU: immediate, without events."""

    def to_host(self, target: Tensor, source: Tensor) -> torch.Event | None:
        """Copy a gradient to its host buffer and return an event, or None if it is complete."""
        target.copy_(source)
        return None

    def release(self, event: torch.Event) -> None:
        """Let the caller enqueue overwrites of the memory that `to_host` copies from."""
        raise AssertionError("copies within host memory leave no events")

    def open_targets(self) -> None:
        """Let later `to_device` calls overwrite parameters that the caller has read so far."""

    def wait(self, event: torch.Event) -> None:
        """Block this thread until a copy is done."""
        raise AssertionError("copies within host memory leave no events")

    def to_device(self, target: Tensor, source: Tensor) -> torch.Event | None:
        """Start to copy new values up and return an event, or None if they have arrived."""
        target.copy_(source)
        return None

    def arrive(self, event: torch.Event) -> None:
        """Make the caller's current stream wait for a `to_device`."""
        raise AssertionError("copies within host memory leave no events")


class AcceleratorStreams(HostStreams):
    """Copies on an accelerator, on streams of their own. See [Note: order of the streams]."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.empty(0, device=device).device  # "cuda" with its index filled in
        self._down = torch.Stream(self._device)
        self._up = torch.Stream(self._device)

    def _current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)

    def to_host(self, target: Tensor, source: Tensor) -> torch.Event:
        """Enqueue on down. The event fires when the gradient has arrived."""
        self._down.wait_event(self._current().record_event())  # 1: down waits for the producer
        with self._down:
            target.copy_(source, non_blocking=True)
        source.record_stream(self._down)  # freed memory is not reused before down has read it
        return self._down.record_event()

    def release(self, event: torch.Event) -> None:
        self._current().wait_event(event)  # 3: the caller waits for down

    def open_targets(self) -> None:
        self._up.wait_event(self._current().record_event())  # 4: up waits for the readers

    def wait(self, event: torch.Event) -> None:
        """Block this thread, which holds no lock and no stream meanwhile."""
        event.synchronize()  # 2 and 5: the worker waits for down, or for up

    def to_device(self, target: Tensor, source: Tensor) -> torch.Event:
        """Enqueue on up. The event fires when the values have arrived."""
        with self._up:
            target.copy_(source, non_blocking=True)
        target.record_stream(self._up)
        return self._up.record_event()

    def arrive(self, event: torch.Event) -> None:
        self._current().wait_event(event)  # 6: the caller waits for up


def open_streams(device: torch.device) -> HostStreams:
    return HostStreams() if device.type == "cpu" else AcceleratorStreams(device)


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
