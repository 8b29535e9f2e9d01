"""Queues on which collectives of several hops run, beside the caller.

The second hop of an exchange cannot start before the first has arrived, and must not wait for the
caller. So the hops of one exchange are a **job**, and jobs run in order in one of two **queues**,
one for gathers and one for reductions. Where a block's parameter is unused on one rank only, the
two interleave differently there; within a queue the order is that of all ranks.

On a host a queue is served by a daemon thread, started at its first use. On an accelerator it is a
stream: a job runs inline and only enqueues.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from zero_core.protocols import Work


@dataclass(slots=True, eq=False)
class Pending:
    """An operation under way, and what waits for it: `zero_core.protocols.Work`."""

    wait: Callable[[], object]


_Job = Callable[[], None]
_Tasks = SimpleQueue["tuple[_Job, Future[None], bool] | None"]
"""Jobs, and whether their callers are in inference mode. None ends the queue."""


class HostQueues:
    """A thread per queue. The threads end when this object does."""

    def __init__(self) -> None:
        self._queues: dict[bool, tuple[threading.Thread, _Tasks]] = {}
        self._lock = threading.Lock()

    def launch(self, job: _Job, *, is_reduction: bool) -> Work:
        """Run ``job`` in the queue's thread. From a job of that queue, at once."""
        outcome: Future[None] = Future()
        with self._lock:
            if is_reduction not in self._queues:
                queue: _Tasks = SimpleQueue()
                name = "zero_core reductions" if is_reduction else "zero_core gathers"
                # Daemons: a peer that is gone must not keep this process from ending.
                thread = threading.Thread(target=_serve, args=(queue,), name=name, daemon=True)
                self._queues[is_reduction] = thread, queue
                thread.start()
        thread, queue = self._queues[is_reduction]
        if threading.current_thread() is thread:
            _run(job, outcome)  # queued, it would wait for the job that waits for it
        else:
            queue.put((job, outcome, torch.is_inference_mode_enabled()))
        return Pending(outcome.result)

    def __del__(self) -> None:
        for _, queue in self._queues.values():
            queue.put(None)


class StreamQueues:
    """A stream per queue, on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[bool, torch.Stream] = {}

    def launch(self, job: _Job, *, is_reduction: bool) -> Work:
        """Run ``job`` with the queue's stream as the current one."""
        if is_reduction not in self._streams:
            # Of high priority, as the library's: its few blocks would wait for a large product's.
            self._streams[is_reduction] = torch.Stream(self._device, priority=-1)
        stream = self._streams[is_reduction]
        outcome: Future[None] = Future()
        current = torch.accelerator.current_stream(self._device)
        if current == stream:  # launched by a job of this queue; torch 2.10 enters no stream twice
            _run(job, outcome)
        else:
            # The queue waits for what the caller has enqueued: the job reads it.
            stream.wait_stream(current)
            with stream:
                _run(job, outcome)
        done = stream.record_event()  # all operations of the job are on its stream

        def wait() -> None:
            outcome.result()
            # The caller's current stream waits for the job: it reads what the job wrote.
            torch.accelerator.current_stream(self._device).wait_event(done)

        return Pending(wait)


CommQueues = HostQueues | StreamQueues


def _run(job: _Job, outcome: Future[None]) -> None:
    try:
        job()
    except BaseException as error:  # whoever waits must hear of it, at each call
        outcome.set_exception(error)
    else:
        outcome.set_result(None)


def _serve(queue: _Tasks) -> None:
    while (task := queue.get()) is not None:
        job, outcome, is_inference = task
        # Torch's modes are a thread's own, and buffers made in inference mode are written only in
        # it. So a job has its caller's.
        with torch.inference_mode(is_inference), torch.no_grad():
            _run(job, outcome)
        del task, job, outcome  # a thread at rest keeps no buffer and no process group alive
