"""Communication queues that run jobs beside the caller: a thread, or a stream of an accelerator.

[Note: ordering of streams]
A queue runs one job after another. On a host that is one thread. On an accelerator the calling
thread enqueues jobs on the queue's stream: the stream first waits for what the caller's stream
holds (the job's input), then runs the job, and the future carries an event that the waiter's
current stream waits for. Memory that a job reads must be kept until its future was waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Thread

import torch
from torch import Tensor
from torch.futures import Future


class HostQueue:
    """Jobs of one thread, which ends with this object.

    After a job that failed no other runs, because the other ranks may be in another job.
    """

    def __init__(self) -> None:
        self._starts: SimpleQueue[Future[None] | None] = SimpleQueue()
        self._failures: list[Exception] = []
        # A daemon: a peer that is gone must not keep this process from ending.
        thread = Thread(target=_serve, args=(self._starts,), name="zero-comm queue", daemon=True)
        thread.start()

    def run(self, job: Callable[[], Tensor]) -> Future[Tensor]:
        """Queue ``job``. The future has its result, or raises RuntimeError with its error."""
        start: Future[None] = Future()
        run = partial(_run_unless_failed, job, self._failures)
        # As a callback, and not by set_exception: torch's own waiters see only errors of callbacks.
        done: Future[Tensor] = start.then(lambda _: run())
        self._starts.put(start)
        return done

    def __del__(self) -> None:
        self._starts.put(None)


class StreamQueue:
    """Jobs on one stream of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device, priority=-1)

    def run(self, job: Callable[[], Tensor]) -> Future[Tensor]:
        """Enqueue ``job`` after the current stream's work. Errors of launching it are raised."""
        future: Future[Tensor] = Future(devices=[self._device])
        # The queue waits for the caller: the job's input is being written there.
        self._stream.wait_event(torch.accelerator.current_stream(self._device).record_event())
        with self._stream:
            # Records the waiters' event on the current stream, which is the queue's.
            future.set_result(_run(job))
        return future


CommQueue = HostQueue | StreamQueue


def open_queue(device: torch.device) -> CommQueue:
    """Return a new queue for jobs on tensors of ``device``."""
    return HostQueue() if device.type == "cpu" else StreamQueue(device)


def _serve(starts: SimpleQueue[Future[None] | None]) -> None:
    while (start := starts.get()) is not None:
        start.set_result(None)


def _run_unless_failed(job: Callable[[], Tensor], failures: list[Exception]) -> Tensor:
    if failures:
        first = failures[0]
        raise RuntimeError(f"not run, as an earlier one failed: {type(first).__name__}: {first}")
    try:
        return _run(job)
    except Exception as error:
        failures.append(error)
        raise


def _run(job: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():
        return job()
