"""Updates of one tier: order of chunks, their update, and the thread that runs it.

A caller that needs a range of parameters waits until every run that overlaps it is published.

[Note: order of need]
Backward produces gradients from the last unit to the first, and forward needs new values from the
first to the last. Of the chunks whose gradient has arrived, the worker updates the one at the
lowest offset, because forward needs it first. If no gradient has arrived, the worker waits for the
oldest copy. Updates of an element keep the order of steps. With `Stepper.is_sequential` chunks keep
the order of `Stepper.plan`.

[Note: ahead of the decision]
Tentative chunks (see `memory_stepper`) are updated in the same order and publish nothing. When the
speculation ends, tentative chunks that were not updated are dropped. If the step is confirmed,
tentative updates are published, and all other chunks are updated and published. Otherwise the
tentative updates are undone. While staging buffers are full (`HostMover.is_full`), the worker
prefers updates to publishing kept chunks.

A `HostThread`, or a simulation of it, calls `Worker.run_next`, which updates one chunk.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
from zero_offload.threads import Threads
from zero_offload.transfers.mover import Arrival, HostMover


@dataclass(slots=True)
class Published:
    """Whether a run's new values are published, and the event that fires when they arrive."""

    is_published: bool = False
    event: torch.Event | None = None


class Progress:
    """Runs of all pending steps, published by one thread and awaited by others.

    ``changed`` guards the runs. It is notified when a run is published or a step ends. ``error`` is
    the error of the first failed step, after which no step may run. ``stall_s`` are the seconds
    in successful calls of `wait`.
    """

    def __init__(
        self,
        changed: threading.Condition | None = None,
        now: Callable[[], float] = perf_counter,
    ) -> None:
        self._changed = changed or threading.Condition()
        self._now = now
        self.stall_s = 0.0
        self._runs: SpanMap[Published] = SpanMap()  # the last run of each element
        self._num_open = 0
        self.error: BaseException | None = None

    def begin(self, runs: Sequence[tuple[int, int]]) -> tuple[list[Published], list[Published]]:
        """Add a step. Return its runs' entries, and those that must be published before them."""
        with self._changed:
            new, before = [Published() for _ in runs], self.begin_unpublished(runs)
            for (start, stop), entry in zip(runs, new, strict=True):
                self._runs.put(start, stop, entry)
        return new, before

    def begin_unpublished(self, runs: Sequence[tuple[int, int]]) -> list[Published]:
        """Add work that publishes nothing. Return entries that must be published before it."""
        with self._changed:
            self._num_open += 1
            overlapping = [entry for run in runs for entry in self._overlapping(*run)]
            return [entry for entry in overlapping if not entry.is_published]

    def publish(self, entry: Published, event: torch.Event | None) -> None:
        """Mark a run as published. Its values have arrived after ``event``, if any."""
        with self._changed:
            entry.event, entry.is_published = event, True
            self._changed.notify_all()

    def finish(self, error: BaseException | None = None) -> None:
        """End a step. If it failed, `check` raises OffloadError from then on."""
        with self._changed:
            self.error = self.error or error
            self._num_open -= 1
            self._changed.notify_all()

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Fail the step if an exception, such as Ctrl-C, interrupts its launch in this context."""
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
        """Return whether all runs that overlap a range have arrived, False after a failure."""
        with self._changed:
            hits = self._overlapping(start, stop)
            have_arrived = (e.is_published and (e.event is None or e.event.query()) for e in hits)
            return self.error is None and all(have_arrived)

    def drain(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None or self._num_open <= 0)
        self.check()

    def check(self) -> None:
        if self.error is not None:
            raise OffloadError(
                f"an optimizer step failed midway ({self.error!r}), so master weights and state "
                f"are partly updated; load a checkpoint into a new tier (with zero_core: build the "
                "engine again)"
            ) from self.error


class Phase(Enum):
    """Work that a job does."""

    WHOLE = "whole"
    """Update and publish."""
    TENTATIVE = "tentative"
    """Update such that it can be undone, and publish nothing."""
    KEEP = "keep"
    """Publish tentative updates, and update and publish chunks without one."""
    UNDO = "undo"
    """Undo tentative updates."""


@dataclass(slots=True, eq=False)
class Speculation:
    """Tentative updates of one step. ``changed`` guards whether one is running or wanted."""

    groups: list[dict[str, Any]]
    grad_scale: float
    changed: threading.Condition
    pieces: set[int] = field(default_factory=set)
    chunks: list[Chunk] = field(default_factory=list)
    _is_over: bool = False
    _is_entered: bool = False

    def is_of(self, groups: list[dict[str, Any]], grad_scale: float) -> bool:
        """Return whether a step with these settings (`freeze_groups`) can keep the updates."""
        return (self.groups, self.grad_scale) == (groups, grad_scale)

    @contextmanager
    def entered(self) -> Iterator[bool]:
        """Enter a chunk's update in this context. Yield False if the speculation has ended."""
        with self.changed:
            self._is_entered = is_wanted = not self._is_over
        try:
            yield is_wanted
        finally:
            with self.changed:
                self._is_entered = False
                self.changed.notify_all()

    def end(self) -> None:
        with self.changed:
            self._is_over = True

    def wait(self) -> None:
        """Block until no chunk is being updated, so that no gradient is read. Call `end` first."""
        with self.changed:
            self.changed.wait_for(lambda: not self._is_entered)


@dataclass(slots=True)
class Job:
    """Chunks that a worker updates, publishes or undoes.

    Attributes:
        arrivals: arrival of each chunk's gradient; None if there is no copy to wait for.
        before: entries over the same elements that must be published before.
        entries: `Progress` entries of each chunk's runs, if the phase publishes.
        readers: event after which parameters may be overwritten; None for no wait.
        num_left: number of chunks that were not updated yet.
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
"""A chunk whose gradient has arrived: (offset, order of arrival, index in the job, job)."""


class Worker:
    """Updater of chunks in the order of need. See [Note: order of need].

    `add` may be called from any thread, all other methods from one thread at a time.

    Attributes:
        update_s: seconds spent on updates so far, without waits for gradients or memory.
        updates: start and end of recent updates, by the clock ``now``.
        log: records of tentative updates; None without undo log.
    """

    def __init__(
        self, stepper: Stepper, mover: HostMover, progress: Progress, now: Callable[[], float]
    ) -> None:
        self.update_s = 0.0
        self.updates: deque[tuple[float, float]] = deque(maxlen=256)
        self.log: UndoLog | None = None
        self._stepper = stepper
        self._mover = mover
        self._progress = progress
        self._now = now
        # chunks that are not ready, by job, and in order of their gradients' copies
        self._waiting: deque[tuple[Job, int]] = deque()
        self._ready: list[_Ready] = []
        self._num_ready = 0

    def add(self, job: Job) -> None:
        """Queue a job. `run_next` must be called once for each of its chunks."""

        def number(index: int) -> int:
            arrival = job.arrivals[index]
            return 0 if arrival is None or self._stepper.is_sequential else arrival.number

        self._waiting.extend((job, index) for index in sorted(range(len(job.chunks)), key=number))

    def awaited(self) -> torch.Event | None:
        """Return the event that `run_next` would wait for, or None if it would not wait."""
        self._admit()
        if self._ready or not self._waiting:
            return None
        job, index = self._waiting[0]
        arrival = job.arrivals[index]
        return None if arrival is None else arrival.event

    def run_next(self) -> None:
        """Update one chunk, or do nothing after a failure."""
        if self._progress.error is not None:
            return
        try:
            with torch.no_grad():  # Grad mode is per thread.
                while (event := self.awaited()) is not None:
                    self._mover.streams.wait(event)
                *_, index, job = self._pop()
                self._update(job, index)
        except BaseException as error:
            self.fail(error)  # Later calls to the tier raise OffloadError from it.
            raise
        if not job.num_left:
            self._progress.finish()

    def fail(self, error: BaseException) -> None:
        self._progress.finish(error)
        self._waiting.clear()
        self._ready.clear()

    def _pop(self) -> _Ready:
        """Pop the first ready chunk. Prefer others to kept ones while staging buffers are full."""
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
        return job.phase is Phase.KEEP and self.log is not None and self.log.has(job.chunks[index])

    def _admit(self) -> None:
        """Move waiting chunks to the ready heap, in order, until one must still wait."""
        while self._waiting:
            job, index = self._waiting[0]
            arrival = job.arrivals[index]
            if arrival is not None and not arrival.event.query():
                return
            if not all(entry.is_published for entry in job.before):
                return  # Earlier updates of these elements are among the ready chunks.
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
        """Update a chunk tentatively, unless the speculation has ended. Return the start time."""
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
        """Undo a chunk's tentative update, if there is one. Return the start time."""
        assert self.log is not None, "there are tentative updates"
        if self.log.has(chunk):
            self._stepper.announce(spans_of([chunk]))
        started = self._now()
        self.log.undo(chunk)
        return started

    def _update_finally(self, job: Job, index: int) -> float:
        """Update a chunk, or keep its tentative update, and publish it. Return the start time."""
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
        return started + (mover.waited_s - waited_s)  # waits do not count as update time


class HostThread:
    """Thread that runs a worker, with ``device`` as its current device."""

    def __init__(self, device: torch.device) -> None:
        self.changed = threading.Condition()
        self._device = with_index(device)
        self._threads = Threads(max_workers=1, thread_name_prefix="zero-offload")

    def now(self) -> float:
        return perf_counter()

    def submit(self, worker: Worker, job: Job) -> None:
        worker.add(job)
        self._threads.submit(self._run_all, worker, len(job.chunks))

    def _run_all(self, worker: Worker, num_chunks: int) -> None:
        try:
            enter_device(self._device)
        except BaseException as error:
            worker.fail(error)
            raise
        for _ in range(num_chunks):
            worker.run_next()
