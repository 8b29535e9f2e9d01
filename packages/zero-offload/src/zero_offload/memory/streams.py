"""Copies between the compute device and host memory, and their order.

[Note: order of the streams]
Three queues work at once on an accelerator: the caller's current stream (forward, backward, the
device's half of the step), the *down* stream (gradients to the host) and the *up* stream
(parameters to the device); the host's worker thread is a fourth actor. Where parameters are sent as
differences, a further stream, *checksums*, reads what they start from.

1. down waits for the caller's stream: a gradient is read after it was computed.
2. the worker waits for down: the host reads a gradient after it arrived.
3. the caller's stream waits for down (`release`): the caller may overwrite a gradient once it has
   called for that.
4. up waits for the caller's stream: a parameter is overwritten after the forward and backward that
   were enqueued before ``step`` have read it. The caller marks the place (`mark_readers`). The
   worker makes up wait for it right before the step's first copy (`follow`). A stream runs in
   order: enqueued by the caller, the wait would hold back the copies of all steps before.
5. the worker waits for up: a staging buffer is refilled after it was sent.
6. the caller's stream waits for up (`arrive`): a parameter is read after its new value is there.
7. checksums waits for the caller's stream as up does, and for earlier copies up of the same
   parameters, but not of others: those may take long.

If the compute device is the CPU, each of them is a plain copy and no order is needed beyond that of
the calls. Nothing here names CUDA: streams and events are ``torch.accelerator``'s.
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
    """A checksum of values on the device: int64, in host memory once the event has fired."""

    value: Tensor
    event: torch.Event | None


_TO_HOST, _TO_DEVICE = "gradients to the host", "parameters to the device"
_MAX_COPIES = 4096
"""Maximum number of timed copies that are kept until `HostStreams.take_copies`."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 500e-6


def block_until(event: torch.Event) -> None:
    """Block until an event has fired, without the spinning of ``synchronize`` on CUDA."""
    pause_s = _SHORTEST_PAUSE_S
    while not event.query():
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def with_index(device: torch.device) -> torch.device:
    """Return the device with the index that it has on this thread."""
    is_indexed = ":" in str(device)
    return device if is_indexed else torch.empty(0, device=device).device


def enter_device(device: torch.device) -> None:
    """Make an accelerator the current device of this thread, before its first stream or event.

    A new thread's device is 0. To enter a stream of another one would make a context on 0, too.
    """
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


class HostStreams:
    """Copies on a CPU: immediate, without events. ``is_timing``: time later copies."""

    is_timing = False

    def take_copies(self) -> list[TimedCopy]:
        """Return the copies that were timed since the last call, in each direction in order."""
        return []

    def to_host(self, target: Tensor, source: Tensor) -> torch.Event | None:
        """Copy a gradient to its host buffer and return an event, or None if it is complete."""
        target.copy_(source)
        return None

    def mark_readers(self) -> torch.Event | None:
        """Return an event after what the caller has enqueued, or None if that is done already."""
        return None

    def to_device(self, target: Tensor, source: Tensor) -> torch.Event | None:
        """Start to copy new values up and return an event, or None if they have arrived."""
        target.copy_(source)
        return None

    def checksum(
        self, codec: UploadCodec, values: Tensor, value: Tensor, earlier: Iterable[torch.Event]
    ) -> Checksum:
        """Start to compute the checksum of parameters that `difference_to_device` will change.

        ``value`` is host memory for it, ``earlier`` events of earlier copies up to ``values``.
        """
        value.copy_(codec.checksum(values))
        return Checksum(value, None)

    def reserve_difference(self, nbytes: int) -> None:
        """Allocate what differences of at most ``nbytes`` need on the device. Called once."""

    def difference_to_device(
        self, codec: UploadCodec, target: Tensor, difference: Tensor
    ) -> torch.Event | None:
        """Start to change values on the device by a difference, as `to_device`.

        It is in host memory, and no longer than `reserve_difference` was told.
        """
        codec.decode(difference, target)
        return None

    def wait(self, event: torch.Event) -> None:
        """Block this thread until a copy is done. Those within host memory leave no events."""
        raise AssertionError("copies within host memory leave no events")

    release = follow = arrive = wait


class AcceleratorStreams(HostStreams):
    """Copies on the streams ``down`` and ``up``. See [Note: order of the streams]."""

    def __init__(self, device: torch.device, down: torch.Stream, up: torch.Stream) -> None:
        self.device = device
        self.down = down
        self.up = up
        self._followers = [up]  # streams that wait for the caller's reads
        self._checksums: torch.Stream | None = None  # for differences alone, as the next
        self._room: Tensor | None = None  # where a difference arrives
        self._reading: deque[tuple[torch.Event, Tensor]] = deque()  # gradients that down reads
        self._copies: deque[TimedCopy] = deque(maxlen=_MAX_COPIES)  # of two threads

    def take_copies(self) -> list[TimedCopy]:
        found = []
        with suppress(IndexError):
            while True:
                found.append(self._copies.popleft())
        return found

    @contextmanager
    def _timed(self, what: str, stream: torch.Stream) -> Iterator[None]:
        """Note when the stream begins and ends what is enqueued on it within, if that is asked."""
        if not self.is_timing:
            yield
            return
        start, end = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        start.record(stream)
        yield
        end.record(stream)
        self._copies.append((what, start, end))

    def current(self) -> torch.Stream:
        """Return the caller's stream."""
        return torch.accelerator.current_stream(self.device)

    def to_host(self, target: Tensor, source: Tensor) -> torch.Event:
        """Enqueue on down. The event fires when the gradient has arrived."""
        self.down.wait_event(self.current().record_event())  # 1: down waits for the producer
        with self.down, self._timed(_TO_HOST, self.down):
            target.copy_(source, non_blocking=True)
        event = self.down.record_event()
        while self._reading and self._reading[0][0].query():
            self._reading.popleft()
        self._reading.append((event, source))  # so that its memory is not reused before
        return event

    def release(self, event: torch.Event) -> None:
        """Let the caller enqueue overwrites of the memory that `to_host` copies from."""
        self.current().wait_event(event)  # 3: the caller waits for down
        if any(own is event for own, _ in self._reading):  # copies down are in order
            while self._reading.popleft()[0] is not event:
                pass

    def mark_readers(self) -> torch.Event:
        return self.current().record_event()

    def follow(self, event: torch.Event) -> None:
        """Let later `to_device` calls begin after an event of `mark_readers`."""
        for stream in self._followers:
            stream.wait_event(event)  # 4 and 7: up and checksums wait for the readers

    def wait(self, event: torch.Event) -> None:
        """Block this thread, which holds no lock and no stream meanwhile."""
        block_until(event)  # 2 and 5: the worker waits for down, or for up

    def to_device(self, target: Tensor, source: Tensor) -> torch.Event:
        """Enqueue on up. The event fires when the values have arrived."""
        with self.up, self._timed(_TO_DEVICE, self.up):
            target.copy_(source, non_blocking=True)
        return self._written_on_up(target)

    def _written_on_up(self, target: Tensor) -> torch.Event:
        target.record_stream(self.up)  # nobody else keeps it if its engine is dropped meanwhile
        return self.up.record_event()

    def reserve_difference(self, nbytes: int) -> None:
        with self.up:  # where its memory is reused
            self._room = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._checksums = torch.Stream(self.device, priority=-1)
        self._followers = [self.up, self._checksums]

    def checksum(
        self, codec: UploadCodec, values: Tensor, value: Tensor, earlier: Iterable[torch.Event]
    ) -> Checksum:
        """Enqueue on checksums. The worker waits for it: ``values`` are not freed before."""
        stream = self._checksums
        assert stream is not None, "`reserve_difference` was called"
        for event in earlier:
            stream.wait_event(event)  # 7: checksums waits for earlier copies of the same
        with stream:
            value.copy_(codec.checksum(values), non_blocking=True)
        return Checksum(value, stream.record_event())

    def difference_to_device(
        self, codec: UploadCodec, target: Tensor, difference: Tensor
    ) -> torch.Event:
        """Enqueue on up, where one difference after another uses the same memory."""
        assert self._room is not None, "`reserve_difference` was called"
        arrived = self._room[: difference.numel()]
        with self.up:
            with self._timed(_TO_DEVICE, self.up):
                arrived.copy_(difference, non_blocking=True)
            codec.decode(arrived, target)
        return self._written_on_up(target)

    def arrive(self, event: torch.Event) -> None:
        """Make the caller's current stream wait for a `to_device`."""
        self.current().wait_event(event)  # 6: the caller waits for up


def open_streams(device: torch.device) -> HostStreams:
    if device.type == "cpu":
        return HostStreams()
    device = with_index(device)
    return AcceleratorStreams(
        device, torch.Stream(device, priority=-1), torch.Stream(device, priority=-1)
    )


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
            block_until(self._event)


def start_copy(out: Tensor, source: Tensor) -> Copy:
    """Enqueue ``out.copy_(source)`` on the current stream. ``source`` is on the host."""
    out.copy_(source, non_blocking=True)
    return Copy(out)
