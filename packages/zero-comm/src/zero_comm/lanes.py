"""Where work runs beside its caller: a thread on hosts, a side stream on accelerators.

[Note: who waits for whom]
A lane runs one job after another. On a host that is one thread. On an accelerator jobs are queued
on the lane's stream by the calling thread: first the lane waits for what the caller's stream holds
(the job's input), then the job, and the future carries an event, for which the current stream of
whoever waits for it waits. Memory that a job reads must be kept until its future was waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Thread

import torch
from torch import Tensor
from torch.futures import Future

__all__ = ["HostLane", "Lane", "StreamLane", "open_lane"]


class HostLane:
    """Jobs of one thread, which ends with this object.

    After one that failed no other runs: the other ranks may be in another job than this one.
    """

    def __init__(self) -> None:
        self._starts: SimpleQueue[Future[None] | None] = SimpleQueue()
        self._failures: list[Exception] = []
        # A daemon: a peer that is gone must not keep this process from ending.
        thread = Thread(target=_serve, args=(self._starts,), name="zero-comm lane", daemon=True)
        thread.start()

    def run(self, job: Callable[[], Tensor]) -> Future[Tensor]:
        """Let the thread run ``job``; the future has its result, or raises RuntimeError for it."""
        start: Future[None] = Future()
        run = partial(_run_unless_failed, job, self._failures)
        # As a callback, and not by set_exception: torch's own waiters see only errors of callbacks.
        done: Future[Tensor] = start.then(lambda _: run())
        self._starts.put(start)
        return done

    def __del__(self) -> None:
        self._starts.put(None)


class StreamLane:
    """Jobs on one stream of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def run(self, job: Callable[[], Tensor]) -> Future[Tensor]:
        """Queue ``job`` after what the current stream holds; raises what it raises."""
        future: Future[Tensor] = Future(devices=[self._device])
        # The lane waits for the caller: the job's input is being written there.
        self._stream.wait_event(torch.accelerator.current_stream(self._device).record_event())
        with self._stream:
            # Records the event that waiters wait for on the current stream, which is the lane's.
            future.set_result(_run(job))
        return future


Lane = HostLane | StreamLane


def open_lane(device: torch.device) -> Lane:
    """A lane for jobs on tensors of ``device``."""
    return HostLane() if device.type == "cpu" else StreamLane(device)


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
