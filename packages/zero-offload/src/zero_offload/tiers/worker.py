"""Updates of one tier: which chunk is next, its update, and the thread that does it.

[Note: order of need]
Backward delivers gradients from the last unit to the first, forward needs new values from the first
to the last. Among the chunks whose gradient has arrived, the worker updates the one that forward
needs first: that of the lowest offset. So in backward it follows the newest gradients, and after it
goes from the first unit to the last, with the next forward behind it. What it updates last is what
forward needs last, and whose gradient comes first in the next backward: a host that bounds the step
hardly ever waits. If no gradient has arrived it waits for the oldest, as copies down are in order.
An element's updates stay in the order of their steps. A stepper that works through its memory in
one order (`Stepper.is_sequential`) gets its chunks in the order of planning.

[Note: ahead of the decision]
Tentative chunks are picked like others, and publish nothing (see `memory_stepper`). Once
the step is decided those that have not been picked are void. The chunks of the decision follow:
kept ones are published, and updated only where that was not done, or undone ones are restored, and
perhaps updated with another factor. All of them are picked in the order of need, but a
kept one waits while copies up of others are under way, and another one is updated meanwhile.

The policy (`Worker`) knows no thread: `Worker.run_next` picks and updates one chunk for whoever
calls it. For a host tier that is a `HostThread`, in tests and in the benchmark ``schedule`` a
simulated clock.

Progress of the steps under way, for callers that wait for a range of them.

A step publishes its runs in the order in which they are updated, which is that of need and not of
offsets (see `zero_offload.tiers.worker`). A caller that needs a range waits until every run that
overlaps it is published, and no longer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush
from time import perf_counter
from typing import Any

import torch

from zero_offload.errors import OffloadError
from zero_offload.flat.geometry import SpanMap
from zero_offload.flat.grads import GradLedger
from zero_offload.memory.streams import enter_device, with_index
from zero_offload.steppers.memory_stepper import UndoLog
from zero_offload.steppers.stepper import Chunk, Stepper, spans_of
from zero_offload.transfers.mover import Arrival, HostMover


@dataclass(slots=True)
class Published:
    """Whether a run's new values are published, and the event that fires when they arrive."""

    is_published: bool = False
    event: torch.Event | None = None


class Progress:
    """Runs of all steps under way, published by one thread and awaited by others.

    ``changed`` guards it and is notified whenever a run is published or a step ends. ``error`` is
    that of the first step that failed. Steps that queue behind it must not run. ``stall_s`` are the
    seconds of `wait` so far.
    """

    def __init__(
        self,
        changed: threading.Condition | None = None,
        now: Callable[[], float] = perf_counter,
    ) -> None:
        self._changed = changed or threading.Condition()
        self._now = now
        self.stall_s = 0.0
        self._runs: SpanMap[Published] = SpanMap()  # the last one of each element
        self._num_open = 0
        self.error: BaseException | None = None

    def begin(self, runs: Sequence[tuple[int, int]]) -> tuple[list[Published], list[Published]]:
        """Add a step. Return an entry per run, and earlier ones that must be published first."""
        with self._changed:
            new = [Published() for _ in runs]
            before: list[Published] = []
            for (start, stop), entry in zip(runs, new, strict=True):
                before += [v for *_, v in self._runs.overlaps(start, stop) if not v.is_published]
                self._runs.put(start, stop, entry)
            self._num_open += 1
        return new, before

    def begin_unpublished(self, runs: Sequence[tuple[int, int]]) -> list[Published]:
        """Add work that publishes nothing. Return entries that must be published before it."""
        with self._changed:
            self._num_open += 1
            overlapping = [entry for run in runs for entry in self._overlapping(*run)]
            return [entry for entry in overlapping if not entry.is_published]

    def publish(self, entry: Published, event: torch.Event | None) -> None:
        """Mark a run as published. ``event`` fires when its values have arrived."""
        with self._changed:
            entry.event, entry.is_published = event, True
            self._changed.notify_all()

    def finish(self, error: BaseException | None = None) -> None:
        """End a step, with an error for all present and later callers if it failed."""
        with self._changed:
            self.error = self.error or error
            self._num_open -= 1
            self._changed.notify_all()

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Begin and launch a step in this context. An exception, Ctrl-C too, fails the step."""
        try:
            yield
        except BaseException as error:
            self.finish(error)
            raise

    def _overlapping(self, start: int, stop: int) -> list[Published]:
        return [entry for *_, entry in self._runs.overlaps(start, stop)]

    def wait(self, start: int, stop: int) -> list[torch.Event]:
        """Block until all runs that overlap a range are published, and return their events."""
        started = self._now()
        with self._changed:
            hits = self._overlapping(start, stop)
            self._changed.wait_for(lambda: self.error or all(e.is_published for e in hits))
        self.check()
        self.stall_s += self._now() - started
        return [entry.event for entry in hits if entry.event is not None]

    def is_over(self, start: int, stop: int) -> bool:
        """Return whether all runs in a range have arrived. False after a step that failed."""
        with self._changed:
            if self.error is not None:
                return False
            hits = self._overlapping(start, stop)
            return all(e.is_published and (e.event is None or e.event.query()) for e in hits)

    def drain(self) -> None:
        """Block until no step is under way."""
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None or self._num_open <= 0)
        self.check()

    def check(self) -> None:
        """Raise OffloadError if a step failed."""
        if self.error is not None:
            raise OffloadError(
                f"an optimizer step failed midway ({self.error!r}), so master weights and state "
                f"are partly updated; load a checkpoint into a new tier (with zero_core: build the "
                "engine again)"
            ) from self.error


_MAX_UPDATES = 256


class Phase(Enum):
    """Part of an update that a job does."""

    WHOLE = "whole"
    """Update and publish."""
    TENTATIVE = "tentative"
    """Update such that it can be undone, and publish nothing."""
    KEEP = "keep"
    """Publish tentative updates, and update chunks without one."""
    UNDO = "undo"
    """Undo tentative updates."""


@dataclass(slots=True, eq=False)
class Speculation:
    """Tentative updates of one step, guarded by ``changed``. The worker enters it per chunk."""

    groups: list[dict[str, Any]]
    grad_scale: float
    changed: threading.Condition
    pieces: set[int] = field(default_factory=set)
    chunks: list[Chunk] = field(default_factory=list)
    _is_over: bool = False
    _is_entered: bool = False

    def is_of(self, groups: list[dict[str, Any]], grad_scale: float) -> bool:
        """Return whether a step with these frozen settings goes on with it."""
        return (self.groups, self.grad_scale) == (groups, grad_scale)

    @contextmanager
    def entered(self) -> Iterator[bool]:
        """Update a chunk in this context, if the value is True: the chunk is still wanted."""
        with self.changed:
            self._is_entered = is_wanted = not self._is_over
        try:
            yield is_wanted
        finally:
            with self.changed:
                self._is_entered = False
                self.changed.notify_all()

    def end(self) -> None:
        """Have no further chunk begun."""
        with self.changed:
            self._is_over = True

    def wait(self) -> None:
        """Block until no chunk is under way, after `end`: gradients are not read any more."""
        with self.changed:
            self.changed.wait_for(lambda: not self._is_entered)


@dataclass(slots=True)
class Job:
    """The chunks of one call of ``step``, in ascending order, on their way through a worker.

    Attributes:
        arrivals: of each chunk's gradient; None if it is in the tier's memory.
        before: entries of earlier steps over the same elements that were not updated yet.
        entries: of each chunk's runs, in `Progress`, if they are published.
        readers: fires when the parameters may be overwritten; None if they may be.
        num_left: chunks that were not updated yet.
    """

    phase: Phase
    chunks: Sequence[Chunk]
    grads: GradLedger
    grad_scale: float
    arrivals: Sequence[Arrival | None]
    before: Sequence[Published]
    entries: Sequence[Sequence[Published]] = ()
    readers: torch.Event | None = None
    speculation: Speculation | None = None
    num_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_left = len(self.chunks)


_Ready = tuple[int, int, int, Job]
"""A chunk whose gradient has arrived: offset, number, index in the job, job."""


class Worker:
    """Picks chunks in the order of need and updates them. See [Note: order of need].

    `add` may be called from any thread, all else from one at a time.

    Attributes:
        update_s: seconds spent on updates so far, without waiting for gradients or memory.
        updates: start and end of the last updates, by the clock ``now``.
        log: of tentative updates; None if there are none.
    """

    def __init__(
        self, stepper: Stepper, mover: HostMover, progress: Progress, now: Callable[[], float]
    ) -> None:
        self.update_s = 0.0
        self.updates: deque[tuple[float, float]] = deque(maxlen=_MAX_UPDATES)
        self.log: UndoLog | None = None
        self._stepper = stepper
        self._mover = mover
        self._progress = progress
        self._now = now
        self._waiting: deque[tuple[Job, int]] = deque()  # for gradients, in the order of arrival
        self._ready: list[_Ready] = []  # a heap
        self._num_ready = 0

    def add(self, job: Job) -> None:
        """Queue a job. `run_next` must be called once for each of its chunks."""

        def number(index: int) -> int:
            arrival = job.arrivals[index]
            return 0 if arrival is None or self._stepper.is_sequential else arrival.number

        self._waiting.extend((job, index) for index in sorted(range(len(job.chunks)), key=number))

    def awaited(self) -> torch.Event | None:
        """Return the event that `run_next` would wait for, or None if it would start at once."""
        self._admit()
        if self._ready or not self._waiting:
            return None
        job, index = self._waiting[0]
        arrival = job.arrivals[index]
        return None if arrival is None else arrival.event

    def run_next(self) -> None:
        """Update one chunk. After a failed one it does nothing. Grad mode is per thread."""
        if self._progress.error is not None:
            return
        try:
            with torch.no_grad():
                while (event := self.awaited()) is not None:
                    self._mover.streams.wait(event)
                *_, index, job = self._pop()
                self._update(job, index)
        except BaseException as error:
            self.fail(error)  # the next call of the tier raises it, whatever it is
            raise
        if not job.num_left:
            self._progress.finish()

    def fail(self, error: BaseException) -> None:
        """End all jobs with an error."""
        self._progress.finish(error)
        self._waiting.clear()
        self._ready.clear()

    def _pop(self) -> _Ready:
        """Return the ready chunk that is needed first. Kept ones may wait for copies up."""
        if self._is_kept(self._ready[0]) and self._mover.is_full:
            others = [ready for ready in self._ready if not self._is_kept(ready)]
            if others:
                found = min(others)
                self._ready.remove(found)
                heapify(self._ready)
                return found
        return heappop(self._ready)

    def _is_kept(self, ready: _Ready) -> bool:
        *_, index, job = ready
        if self.log is None or job.phase is not Phase.KEEP:
            return False
        return self.log.has(job.chunks[index])

    def _admit(self) -> None:
        """Make the chunks ready whose gradients have arrived."""
        while self._waiting:
            job, index = self._waiting[0]
            arrival = job.arrivals[index]
            if arrival is not None and not arrival.event.query():
                return
            if not all(entry.is_published for entry in job.before):
                return  # they are among the ready ones
            self._waiting.popleft()
            offset = 0 if self._stepper.is_sequential else job.chunks[index].runs[0].start
            heappush(self._ready, (offset, self._num_ready, index, job))
            self._num_ready += 1

    def _update(self, job: Job, index: int) -> None:
        if job.phase is Phase.TENTATIVE:
            started = self._update_tentatively(job, index)
        elif job.phase is Phase.UNDO:
            started = self._undo(job.chunks[index])
        else:
            started = self._update_finally(job, index)
        job.num_left -= 1
        if not job.num_left:
            self._stepper.settle()
        ended = self._now()
        self.update_s += ended - started
        self.updates.append((started, ended))

    def _update_tentatively(self, job: Job, index: int) -> float:
        """Update a chunk such that it can be undone, if that is still wanted. Return the start."""
        speculation, log, chunk = job.speculation, self.log, job.chunks[index]
        assert speculation is not None, "a tentative job has one"
        assert log is not None, "and a log"
        started = self._now()
        with speculation.entered() as is_wanted:
            if is_wanted:
                self._stepper.announce(spans_of([chunk]))
                self._mover.make_way()
                started = self._now()
                log.update(chunk, job.grads, job.grad_scale)
        return started

    def _undo(self, chunk: Chunk) -> float:
        """Restore what was before a chunk's tentative update, if there is one. Return the start."""
        assert self.log is not None, "there are tentative updates"
        if self.log.has(chunk):
            self._stepper.announce(spans_of([chunk]))
        started = self._now()
        self.log.undo(chunk)
        return started

    def _update_finally(self, job: Job, index: int) -> float:
        """Update a chunk, unless a tentative update is kept, and publish it. Return the start."""
        chunk, mover = job.chunks[index], self._mover
        if job.readers is not None:
            mover.streams.follow(job.readers)
            job.readers = None
        self._stepper.announce(spans_of([chunk]))
        mover.make_way()
        mover.open_spans(spans_of([chunk]))
        started = self._now()
        if job.phase is Phase.KEEP and self.log is not None and self.log.keep(chunk):
            if not self._stepper.is_in_place:
                self.log.round_to(chunk, mover.out)
        else:
            if self.log is not None:
                self.log.undo(chunk)
            self._stepper.update(chunk, job.grads, job.grad_scale, mover.out)
        waited_s = mover.waited_s
        for run, entry in zip(chunk.runs, job.entries[index], strict=True):
            self._progress.publish(entry, mover.publish(run.start, run.stop))
        return started + (mover.waited_s - waited_s)  # as if it had waited before


class HostThread:
    """Thread in which a worker updates. ``device`` becomes its current device.

    A simulation overrides the methods. ``changed`` is notified whenever a run is published.
    """

    def __init__(self, device: torch.device) -> None:
        self.changed = threading.Condition()
        self._device = with_index(device)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="zero-offload")

    def now(self) -> float:
        """Return the time on the calling thread, in seconds."""
        return perf_counter()

    def submit(self, worker: Worker, job: Job) -> None:
        """Have the worker update a job's chunks."""
        worker.add(job)
        self._executor.submit(_run_all, worker, len(job.chunks), self._device)


def _run_all(worker: Worker, num_chunks: int, device: torch.device) -> None:
    try:
        enter_device(device)
    except BaseException as error:
        worker.fail(error)
        raise
    for _ in range(num_chunks):
        worker.run_next()
