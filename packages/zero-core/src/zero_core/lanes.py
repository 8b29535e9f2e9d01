"""Lanes: what collectives of several hops run on, beside the caller.

The second hop of an exchange cannot start before the first has arrived, and must not wait until
whoever asked for it comes by: so the hops of one exchange are a **job**, and jobs run in order in
one of two **lanes**, one for gathers and one for reductions. Where a block's parameter is unused on
one rank only, the two interleave differently there; within a lane the order is that of all ranks.

On a host a lane is a daemon thread, started when it is first used. On an accelerator it is a
stream: a job runs inline and only enqueues.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import torch

from zero_core.protocols import Work

__all__ = ["HostLanes", "Lanes", "StreamLanes", "lanes_of"]

_Job = Callable[[], None]


class Lanes(Protocol):
    """Runs jobs beside the caller."""

    def launch(self, job: _Job, *, is_reduction: bool) -> Work:
        """See `zero_core.protocols.NativeCollectives.launch`."""
        ...


def lanes_of(device: torch.device) -> Lanes:
    """The lanes of a compute device."""
    return HostLanes() if device.type in ("cpu", "meta") else StreamLanes(device)


class HostLanes:
    """A thread per lane; the threads end when this object does."""

    def __init__(self) -> None:
        self._queues: dict[bool, SimpleQueue[_Job | None]] = {}
        self._threads: dict[bool, threading.Thread] = {}
        self._lock = threading.Lock()

    def launch(self, job: _Job, *, is_reduction: bool) -> Work:
        """Run ``job`` in the lane's thread; by a job of that lane, at once."""
        result = _Result(_with_modes_of_caller(job))
        if threading.current_thread() is self._threads.get(is_reduction):
            result.run()  # queued, it would wait for the job that waits for it
        else:
            self._queue(is_reduction).put(result.run)
        return result

    def _queue(self, is_reduction: bool) -> SimpleQueue[_Job | None]:
        with self._lock:
            if is_reduction not in self._queues:
                queue: SimpleQueue[_Job | None] = SimpleQueue()
                name = "zero_core reductions" if is_reduction else "zero_core gathers"
                # Daemons: a peer that is gone must not keep this process from ending.
                thread = threading.Thread(target=_serve, args=(queue,), name=name, daemon=True)
                self._queues[is_reduction] = queue
                self._threads[is_reduction] = thread
                thread.start()
            return self._queues[is_reduction]

    def __del__(self) -> None:
        for queue in self._queues.values():
            queue.put(None)


class StreamLanes:
    """A stream per lane, on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[bool, torch.Stream] = {}

    def launch(self, job: _Job, *, is_reduction: bool) -> Work:
        """Run ``job`` with the lane's stream as the current one."""
        if is_reduction not in self._streams:
            self._streams[is_reduction] = torch.Stream(self._device)
        stream = self._streams[is_reduction]
        # The lane waits for what the caller has enqueued: the job reads it.
        stream.wait_stream(torch.accelerator.current_stream(self._device))
        with stream:
            result = _Result(job)
            result.run()
            done = stream.record_event()

        def wait() -> None:
            result.wait()
            # The waiter's stream waits for the job: it reads what the job wrote.
            torch.accelerator.current_stream(self._device).wait_event(done)

        return _Enqueued(wait)


class _Result:
    """A job, and what came of it."""

    def __init__(self, job: _Job) -> None:
        self._job: _Job | None = job
        self._error: BaseException | None = None
        self._is_done = threading.Event()

    def run(self) -> None:
        job, self._job = self._job, None  # what it holds is free when it is done
        assert job is not None
        try:
            job()
        except BaseException as error:  # whoever waits must hear of it
            self._error = error
        finally:
            self._is_done.set()

    def wait(self) -> None:
        """Wait for the job; what it raised is raised here, at each call."""
        self._is_done.wait()
        if self._error is not None:
            raise self._error


class _Enqueued:
    """A job of which all is enqueued."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


def _serve(queue: SimpleQueue[_Job | None]) -> None:
    while True:
        run = queue.get()
        if run is None:
            return
        run()
        del run  # a thread at rest keeps no buffer and no process group alive


def _with_modes_of_caller(job: _Job) -> _Job:
    """torch's modes are a thread's own; buffers made in inference mode are written only in it."""
    return partial(_run_with_modes, job, torch.is_inference_mode_enabled())


def _run_with_modes(job: _Job, is_inference: bool) -> None:
    with torch.inference_mode(is_inference), torch.no_grad():
        job()
