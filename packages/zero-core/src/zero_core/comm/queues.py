"""Queues that run multi-hop collectives asynchronously.

In a multi-hop exchange, a rank forwards data that it has received, independently of the caller. The
hops of one exchange therefore form a **job**. There are two **queues**, one for gathers and one for
reductions, and each runs its jobs in order. If a parameter is unused on one rank only, gathers and
reductions interleave differently on that rank, but the order within each queue is equal on all
ranks.

On a host, a daemon thread serves each queue. On an accelerator, a queue is a stream: jobs run
inline and only enqueue work.
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
    """Implementation of `zero_core.protocols.Work` by a function."""

    wait: Callable[[], object]


_Job = Callable[[], None]
_Tasks = SimpleQueue["tuple[_Job, Future[None], bool] | None"]
"""(job, outcome, whether the caller is in inference mode). None ends the queue."""


class HostQueues:
    """A daemon thread per queue, which ends when this object is deleted and its jobs are done."""

    def __init__(self) -> None:
        self._queues: dict[bool, tuple[threading.Thread, _Tasks]] = {}
        self._lock = threading.Lock()

    def launch(self, job: _Job, *, is_reduction: bool) -> Work:
        """Run ``job`` on the queue's thread. If that is the calling thread, run it inline."""
        outcome: Future[None] = Future()
        with self._lock:
            if is_reduction not in self._queues:
                queue: _Tasks = SimpleQueue()
                name = "zero_core reductions" if is_reduction else "zero_core gathers"
                # Daemon threads, so that a dead peer cannot prevent this process from exiting.
                thread = threading.Thread(target=_serve, args=(queue,), name=name, daemon=True)
                self._queues[is_reduction] = thread, queue
                thread.start()
        thread, queue = self._queues[is_reduction]
        if threading.current_thread() is thread:
            _run(job, outcome)  # the running job may wait for this one: a queued job would deadlock
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
        """Run ``job`` at once, with the queue's stream as the current stream."""
        if is_reduction not in self._streams:
            # High priority: otherwise NCCL's few thread blocks wait for those of large matmuls.
            self._streams[is_reduction] = torch.Stream(self._device, priority=-1)
        stream = self._streams[is_reduction]
        outcome: Future[None] = Future()
        current = torch.accelerator.current_stream(self._device)
        if current == stream:  # called by a job of this queue (torch 2.10 cannot re-enter a stream)
            _run(job, outcome)
        else:
            # The job may read tensors that the caller has written on its current stream.
            stream.wait_stream(current)
            with stream, torch.no_grad():
                _run(job, outcome)
        done = stream.record_event()

        def wait() -> None:
            outcome.result()
            # The caller may read tensors that the job has written.
            torch.accelerator.current_stream(self._device).wait_event(done)

        return Pending(wait)


CommQueues = HostQueues | StreamQueues


def _run(job: _Job, outcome: Future[None]) -> None:
    try:
        job()
    except BaseException as error:  # every call of `Pending.wait` raises the error
        outcome.set_exception(error)
    else:
        outcome.set_result(None)


def _serve(queue: _Tasks) -> None:
    while (task := queue.get()) is not None:
        job, outcome, is_inference = task
        # Torch's inference mode is per thread. Tensors created in inference mode can be written
        # only in inference mode, so the job runs in its caller's mode.
        with torch.inference_mode(is_inference), torch.no_grad():
            _run(job, outcome)
        del task, job, outcome  # otherwise an idle thread keeps buffers and process groups alive
