"""Where work runs beside its caller: a thread on hosts, a side stream on accelerators.

[Note: who waits for whom]
A lane runs one job after another. On a host that is one thread. On an accelerator jobs are queued
on the lane's stream by the calling thread: first the lane waits for what the caller's stream holds
(the job's input), then the job, and the future carries an event, for which the current stream of
whoever waits for it waits. Memory that a job reads must be kept until its future was waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.futures import Future

__all__ = ["HostLane", "Lane", "StreamLane", "open_lane"]


class HostLane:
    """Jobs of one thread, which ends with this object."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zero-comm lane")

    def run(self, job: Callable[[], Tensor]) -> Future[Tensor]:
        """Let the thread run ``job``; the future has its result, or raises RuntimeError for it."""
        start: Future[None] = Future()
        # As a callback, and not by set_exception: torch's own waiters see only errors of callbacks.
        done: Future[Tensor] = start.then(lambda _: _run(job))
        self._thread.submit(start.set_result, None)
        return done


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


def _run(job: Callable[[], Tensor]) -> Tensor:
    with torch.no_grad():
        return job()
