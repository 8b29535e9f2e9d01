"""Virtual time: the scheduling code of a host tier under streams that only advance a clock.

Nothing waits and nothing is measured. Work on a stream takes the seconds that it is given, so that
the length of a step follows from the order in which the tier enqueues, waits and updates. It is the
same in every run.

[Note: clocks]
caller   Python that trains, ahead of the device as far as its waits allow
worker   the host's updates; a job is not visible to it before the caller has submitted it
stream   the end of what is enqueued; work begins no earlier than its enqueuing, the work before it
         and the events that the stream waits for

Times of events are known when they are recorded, because nothing that is enqueued later changes
them. The worker is driven by the caller: when that blocks, or asks for the worker's progress, it
runs every chunk that it would have picked by then. Sums of gradients, on a thread of their own,
take no time.
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
    """Seconds ``[start, stop)`` in which a lane was busy with something."""

    lane: str
    what: str
    start: float
    stop: float


@dataclass(slots=True)
class VirtualTime:
    """The clocks of one simulation, in seconds, and what each lane has done. See [Note: clocks]."""

    caller: float = 0.0
    worker: float = 0.0
    is_worker: bool = False
    spans: list[Span] = field(default_factory=list)
    worker_thread: int = 0

    @contextmanager
    def as_worker(self) -> Iterator[None]:
        """Let this thread be the worker meanwhile."""
        self.is_worker, self.worker_thread = True, threading.get_ident()
        try:
            yield
        finally:
            self.is_worker = False

    def now(self) -> float:
        """Return the clock of whoever runs."""
        return self.worker if self.is_worker else self.caller

    def advance_to(self, time: float) -> None:
        """Let whoever runs wait until ``time``."""
        if self.is_worker:
            self.worker = max(self.worker, time)
        else:
            self.caller = max(self.caller, time)

    def work(self, lane: str, what: str, seconds: float) -> None:
        """Advance the clock of the current thread by ``seconds``."""
        start = self.now()
        self.advance_to(start + seconds)
        self.note(lane, what, start, start + seconds)

    def note(self, lane: str, what: str, start: float, stop: float) -> None:
        """Record that a lane was busy."""
        if stop > start:
            self.spans.append(Span(lane, what, start, stop))


@dataclass(frozen=True, slots=True)
class VirtualEvent:
    """Fires at a time."""

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
    """A stream whose work takes given times and keeps ``lane`` busy."""

    time: VirtualTime
    lane: str
    end: float

    def __new__(cls, time: VirtualTime, lane: str) -> VirtualStream:
        stream: VirtualStream = super().__new__(cls, device=torch.device("cpu"))
        stream.time, stream.lane, stream.end = time, lane, 0.0
        return stream

    def __init__(self, time: VirtualTime, lane: str) -> None:
        """See the class."""

    def enqueue(self, what: str, seconds: float) -> None:
        """Enqueue work that takes so long."""
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
        """Return at once: no stream is current."""


class VirtualStreams(AcceleratorStreams):
    """An accelerator's streams. An element takes ``down_s`` seconds to the host, ``up_s`` back.

    ``compute`` is the caller's stream.
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
        """Let the worker wait. What other threads do beside both clocks takes no time."""
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
    """Condition whose waits drive the worker."""

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
    """`HostThread` whose worker is run by the caller, on a clock of its own."""

    def __init__(self, time: VirtualTime) -> None:
        super().__init__(torch.device("cpu"))
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
        """Run every chunk that the worker has picked by the caller's time."""
        while not self.time.is_worker and self.run_next(self.time.caller):
            pass

    def run_next(self, until: float | None) -> bool:
        """Run the next chunk, if there is one and the worker picks it by ``until``."""
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
