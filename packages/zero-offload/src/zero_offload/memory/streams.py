"""Copies between the compute device and host memory, and their order.

[Note: order of the streams]
An accelerator has three queues: the caller's current stream (forward, backward, device updates),
the *down* stream (gradients to the host) and the *up* stream (parameters to the device). The host's
update thread, the worker, is a fourth. If new parameters are sent as differences, a *checksums*
stream reads the old values.

Rules:

1. down waits for the caller's stream: a gradient is copied after it was computed.
2. The worker waits for down: the host reads a gradient after it arrived.
3. The caller's stream waits for down (`release`): the caller may then overwrite the gradient.
4. up waits for the caller's stream: a parameter is overwritten after all kernels enqueued before
``step``. The caller records an event (`mark_readers`). The worker makes up wait for it just before
the step's first copy (`follow`), so that earlier steps' copies on up are not delayed.
5. The worker waits for up: a staging buffer is refilled after it was sent.
6. The caller's stream waits for up (`arrive`): a parameter is read after its new value arrived.
7. checksums waits for the caller's stream like up, and for earlier copies of the same parameters.

If the compute device is the CPU, copies are synchronous, without streams.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_offload.protocols import UploadCodec

TimedCopy = tuple[str, torch.Event, torch.Event]
"""Kind of a copy, and the events before and after it."""


@dataclass(frozen=True, slots=True)
class Checksum:
    """A checksum of values on the device: int64 in host memory, valid after ``event``."""

    value: Tensor
    event: torch.Event | None


_TO_HOST, _TO_DEVICE = "gradients to the host", "parameters to the device"
_MAX_COPIES = 4096
"""Maximum number of timed copies that are kept until `HostStreams.take_copies`."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 500e-6


def block_until(event: torch.Event) -> None:
    """Block until an event has fired. Unlike ``synchronize`` on CUDA, this does not spin."""
    pause_s = _SHORTEST_PAUSE_S
    while not event.query():
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def with_index(device: torch.device) -> torch.device:
    """Return the device with an explicit index: that of the thread's current device by default."""
    is_indexed = ":" in str(device)
    return device if is_indexed else torch.empty(0, device=device).device


def enter_device(device: torch.device) -> None:
    """Make an accelerator this thread's current device, which is 0 in a new thread.

    Otherwise the first stream or event would create a context on device 0.
    """
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


class HostStreams:
    """Synchronous copies on a CPU, without events. ``is_timing`` has no effect here."""

    is_timing = False

    def take_copies(self) -> list[TimedCopy]:
        """Return and clear the timed copies, in order for each direction. A CPU has none."""
        return []

    def to_host(self, target: Tensor, source: Tensor) -> torch.Event | None:
        """Copy ``source`` to ``target``. Return the end's event if it is asynchronous, or None."""
        target.copy_(source)
        return None

    to_device = to_host

    def mark_readers(self) -> torch.Event | None:
        """Return an event after all work that the caller enqueued, or None on a CPU."""
        return None

    def checksum(
        self, codec: UploadCodec, values: Tensor, value: Tensor, earlier: Iterable[torch.Event]
    ) -> Checksum:
        """Start to compute the checksum of parameters before `difference_to_device` changes them.

        ``value`` is host memory for it. ``earlier`` are events of pending copies to ``values``.
        """
        value.copy_(codec.checksum(values))
        return Checksum(value, None)

    def reserve_difference(self, nbytes: int) -> None:
        """Allocate device memory, once, for differences of at most ``nbytes``."""

    def difference_to_device(
        self, codec: UploadCodec, target: Tensor, difference: Tensor
    ) -> torch.Event | None:
        """Apply a difference in host memory to ``target``. Return an event if asynchronous."""
        codec.decode(difference, target)
        return None

    def wait(self, event: torch.Event) -> None:
        """Block this thread until an event has fired. Copies on a CPU have no events."""
        raise AssertionError("copies within host memory leave no events")

    release = follow = arrive = wait


class AcceleratorStreams(HostStreams):
    """Copies on the streams ``down`` and ``up``. See [Note: order of the streams]."""

    def __init__(self, device: torch.device, down: torch.Stream, up: torch.Stream) -> None:
        self.device = device
        self.down = down
        self.up = up
        self._followers = [up]  # streams that `follow` orders after the caller's reads
        self._checksums: torch.Stream | None = None  # created for differences only
        self._room: Tensor | None = None  # device buffer of one difference
        self._reading: deque[tuple[torch.Event, Tensor]] = deque()  # gradients with a pending copy
        # One thread appends timed copies, and another removes them.
        self._copies: deque[TimedCopy] = deque(maxlen=_MAX_COPIES)

    def take_copies(self) -> list[TimedCopy]:
        found = []
        with suppress(IndexError):
            while True:
                found.append(self._copies.popleft())
        return found

    @contextmanager
    def _timed(self, what: str, stream: torch.Stream) -> Iterator[None]:
        """Record events around the work enqueued in this context if `is_timing` is set."""
        if not self.is_timing:
            yield
            return
        start, end = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        start.record(stream)
        yield
        end.record(stream)
        self._copies.append((what, start, end))

    def current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)

    def to_host(self, target: Tensor, source: Tensor) -> torch.Event:
        # Rule 1 of [Note: order of the streams]: copy the gradient after it was computed.
        self.down.wait_event(self.current().record_event())
        with self.down, self._timed(_TO_HOST, self.down):
            target.copy_(source, non_blocking=True)
        event = self.down.record_event()
        while self._reading and self._reading[0][0].query():
            self._reading.popleft()
        self._reading.append((event, source))  # keeps the source's memory until the copy is done
        return event

    def release(self, event: torch.Event) -> None:
        """Make the current stream wait for a `to_host`, so that it may overwrite the source."""
        self.current().wait_event(event)  # Rule 3: overwrite the gradient after it was copied.
        # Copies on down are in order, so the stream waits for earlier ones too.
        if any(own is event for own, _ in self._reading):
            while self._reading.popleft()[0] is not event:
                pass

    def mark_readers(self) -> torch.Event:
        return self.current().record_event()

    def follow(self, event: torch.Event) -> None:
        """Make later copies to the device and checksums wait for an event of `mark_readers`."""
        for stream in self._followers:
            # Rules 4 and 7: overwrite parameters after the caller's kernels have read them.
            stream.wait_event(event)

    def wait(self, event: torch.Event) -> None:
        block_until(event)  # Rules 2 and 5: the worker waits for a copy on down or up.

    def to_device(self, target: Tensor, source: Tensor) -> torch.Event:
        with self.up, self._timed(_TO_DEVICE, self.up):
            target.copy_(source, non_blocking=True)
        return self._written_on_up(target)

    def _written_on_up(self, target: Tensor) -> torch.Event:
        target.record_stream(self.up)  # keeps the memory if its owner is deleted during the copy
        return self.up.record_event()

    def reserve_difference(self, nbytes: int) -> None:
        with self.up:  # The buffer is allocated for use on up.
            self._room = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._checksums = torch.Stream(self.device, priority=-1)
        self._followers = [self.up, self._checksums]

    def checksum(
        self, codec: UploadCodec, values: Tensor, value: Tensor, earlier: Iterable[torch.Event]
    ) -> Checksum:
        stream = self._checksums
        assert stream is not None, "`reserve_difference` was called"
        for event in earlier:
            stream.wait_event(event)  # Rule 7: read the values after earlier copies to them.
        with stream:
            value.copy_(codec.checksum(values), non_blocking=True)
        return Checksum(value, stream.record_event())

    def difference_to_device(
        self, codec: UploadCodec, target: Tensor, difference: Tensor
    ) -> torch.Event:
        assert self._room is not None, "`reserve_difference` was called"
        arrived = self._room[: difference.numel()]
        with self.up:
            with self._timed(_TO_DEVICE, self.up):
                arrived.copy_(difference, non_blocking=True)
            codec.decode(arrived, target)
        return self._written_on_up(target)

    def arrive(self, event: torch.Event) -> None:
        """Make the current stream wait for an event of `to_device` or `difference_to_device`."""
        self.current().wait_event(event)  # Rule 6: read parameters after their new values arrived.


def open_streams(device: torch.device) -> HostStreams:
    if device.type == "cpu":
        return HostStreams()
    device = with_index(device)
    return AcceleratorStreams(
        device, torch.Stream(device, priority=-1), torch.Stream(device, priority=-1)
    )


class Copy:
    """Handle of a copy to ``out``, enqueued on the stream that is current at construction."""

    def __init__(self, out: Tensor) -> None:
        self._device = out.device
        self._event: torch.Event | None = None
        if self._device.type != "cpu":
            self._event = torch.accelerator.current_stream(self._device).record_event()

    def wait(self) -> None:
        """Make the current stream wait for the copy. On a CPU the copy is complete already."""
        if self._event is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._event)

    def block(self) -> None:
        """Block this thread until the copy is complete."""
        if self._event is not None:
            block_until(self._event)


def start_copy(out: Tensor, source: Tensor) -> Copy:
    """Enqueue ``out.copy_(source)`` on the current stream. ``source`` is in host memory."""
    out.copy_(source, non_blocking=True)
    return Copy(out)
