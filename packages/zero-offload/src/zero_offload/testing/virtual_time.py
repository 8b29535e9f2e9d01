"""Virtual time: a host tier's real scheduling code on streams that only advance a clock.

Work on a stream takes a given number of seconds, so a step takes the same time in every run.

[Note: clocks]
caller  the training thread. It runs ahead of the device except where it waits.
worker  the simulated thread of the host's updates. It can start a job once that is submitted.
stream  end time of all enqueued work. New work starts after the enqueue call, after earlier work
        and after the events that the stream waits for.

An event's time is known when it is recorded. When the caller blocks or enters the tier's condition,
it runs all chunks that a real worker would have picked by then. Gradient sums take no time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from zero_offload.memory.streams import AcceleratorStreams
from zero_offload.tiers.worker import HostThread, Job, Worker

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds ``[start, stop)`` in which a lane was busy with work named ``what``."""

    lane: str
    what: str
    start: float
    stop: float


@dataclass(slots=True)
class VirtualTime:
    """Clocks of one simulation, in seconds, and the spans of all lanes. See [Note: clocks]."""

    caller: float = 0.0
    worker: float = 0.0
    is_worker: bool = False
    spans: list[Span] = field(default_factory=list)
    worker_thread: int = 0

    @contextmanager
    def as_worker(self) -> Iterator[None]:
        self.is_worker, self.worker_thread = True, threading.get_ident()
        try:
            yield
        finally:
            self.is_worker = False

    def now(self) -> float:
        """Return the worker's clock in `as_worker`, otherwise the caller's."""
        return self.worker if self.is_worker else self.caller

    def advance_to(self, time: float) -> None:
        """Advance the current clock to ``time`` if that is later."""
        if self.is_worker:
            self.worker = max(self.worker, time)
        else:
            self.caller = max(self.caller, time)

    def work(self, lane: str, what: str, seconds: float) -> None:
        start = self.now()
        self.advance_to(start + seconds)
        self.note(lane, what, start, start + seconds)

    def note(self, lane: str, what: str, start: float, stop: float) -> None:
        if stop > start:
            self.spans.append(Span(lane, what, start, stop))


@dataclass(frozen=True, slots=True)
class VirtualEvent:
    """Event that fires at time ``at``."""

    time: VirtualTime
    at: float

    def query(self) -> bool:
        return self.at <= self.time.now()

    def synchronize(self) -> None:
        self.time.advance_to(self.at)

    def elapsed_time(self, later: VirtualEvent) -> float:
        """Return the milliseconds from this event to a later one."""
        return (later.at - self.at) * 1e3


class VirtualStream(torch.Stream):
    """Stream whose work takes given times and is recorded as spans of ``lane``."""

    time: VirtualTime
    lane: str
    end: float

    def __new__(cls, time: VirtualTime, lane: str) -> VirtualStream:
        stream: VirtualStream = super().__new__(cls, device=torch.device("cpu"))
        stream.time, stream.lane, stream.end = time, lane, 0.0
        return stream

    def __init__(self, time: VirtualTime, lane: str) -> None:
        """Do nothing: `__new__` sets all attributes."""

    def enqueue(self, what: str, seconds: float) -> None:
        start = max(self.end, self.time.now())
        self.end = start + seconds
        self.time.note(self.lane, what, start, self.end)

    def record_event(self, event: object = None) -> Any:
        return VirtualEvent(self.time, max(self.end, self.time.now()))

    def wait_event(self, event: Any) -> None:
        self.end = max(self.end, event.at)

    def __enter__(self) -> VirtualStream:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing: virtual streams are never the current stream."""


class VirtualStreams(AcceleratorStreams):
    """`AcceleratorStreams` in virtual time. Copies to the device take time but write nothing.

    A copy takes ``down_s`` seconds per element to the host, and ``up_s`` to the device.
    """

    def __init__(self, compute: VirtualStream, down_s: float, up_s: float) -> None:
        time = compute.time
        self._downward, self._upward = VirtualStream(time, "down"), VirtualStream(time, "up")
        super().__init__(torch.device("cpu"), self._downward, self._upward)
        self._compute = compute
        self._down_s = down_s
        self._up_s = up_s

    def current(self) -> VirtualStream:
        return self._compute

    def wait(self, event: torch.Event) -> None:
        """Advance the worker's clock in the worker's thread. Other threads' waits take no time."""
        time = self._compute.time
        if time.is_worker and threading.get_ident() == time.worker_thread:
            event.synchronize()

    def to_host(self, target: Tensor, source: Tensor) -> torch.Event:
        self._downward.wait_event(self._compute.record_event())
        self._downward.enqueue("gradient", source.numel() * self._down_s)
        return super().to_host(target, source)

    def to_device(self, target: Tensor, source: Tensor) -> torch.Event:
        self._upward.enqueue("parameters", source.numel() * self._up_s)
        event: torch.Event = self._upward.record_event()
        return event


class _Blocking(threading.Condition):
    """Condition that runs the worker when it is entered or waited for."""

    def __init__(self, thread: VirtualThread) -> None:
        super().__init__()
        self._driven = thread

    def __enter__(self) -> bool:
        self._driven.catch_up()
        return super().__enter__()

    def wait_for(self, predicate: Callable[[], _T], timeout: float | None = None) -> _T:
        while not (found := predicate()):
            if not self._driven.run_next(None):
                raise AssertionError("the caller waits for what nobody is going to do")
            self._driven.time.caller = max(self._driven.time.caller, self._driven.time.worker)
        return found


class VirtualThread(HostThread):
    """`HostThread` whose worker the calling thread runs, on the worker's own clock."""

    def __init__(self, time: VirtualTime) -> None:
        # The base class's constructor would create a thread pool.
        self.time = time
        self.changed = _Blocking(self)
        self._submitted: deque[tuple[float, Job]] = deque()
        self._worker: Worker | None = None
        self._num_left = 0

    def now(self) -> float:
        return self.time.now()

    def submit(self, worker: Worker, job: Job) -> None:
        self._worker = worker
        self._submitted.append((self.time.caller, job))

    def catch_up(self) -> None:
        """Run every chunk that the worker picks by the caller's time."""
        while not self.time.is_worker and self.run_next(self.time.caller):
            pass

    def run_next(self, until: float | None) -> bool:
        """Run the next chunk if the worker picks it by ``until``. Return False if it does not."""
        time, worker = self.time, self._worker
        if worker is None:
            return False
        if not self._num_left and self._submitted:
            if until is not None and self._submitted[0][0] > until:
                return False
            time.worker = max(time.worker, self._submitted[0][0])
        self._deliver(worker)
        if not self._num_left or (until is not None and time.worker > until):
            return False
        with time.as_worker():
            event = cast("VirtualEvent | None", worker.awaited())
            if event is not None:
                if until is not None and event.at > until:
                    return False
                time.worker = max(time.worker, event.at)
                self._deliver(worker)
            self._num_left -= 1
            worker.run_next()
        return True

    def _deliver(self, worker: Worker) -> None:
        while self._submitted and self._submitted[0][0] <= self.time.worker:
            _, job = self._submitted.popleft()
            self._num_left += len(job.chunks)
            worker.add(job)
