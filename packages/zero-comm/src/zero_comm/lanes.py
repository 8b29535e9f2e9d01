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

__all__ = ["HostLane", "Lane", "StreamLane"]


class HostLane:
    """Jobs of one thread, which ends with this object."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zero-comm lane")

    def run(self, job: Callable[[], Tensor]) -> Future[Tensor]:
        """Let the thread run ``job``; the future has its result or its exception."""
        future: Future[Tensor] = Future()
        self._thread.submit(_fulfil, future, job)
        return future


class StreamLane:
    """Jobs on one stream of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def run(self, job: Callable[[], Tensor]) -> Future[Tensor]:
        """Queue ``job`` after what the current stream holds; see [Note: who waits for whom]."""
        future: Future[Tensor] = Future(devices=[self._device])
        # The lane waits for the caller: the job's input is being written there.
        self._stream.wait_event(torch.accelerator.current_stream(self._device).record_event())
        with self._stream:
            _fulfil(future, job)  # records the event that waiters wait for on the lane's stream
        return future


Lane = HostLane | StreamLane


def open_lane(device: torch.device) -> Lane:
    """A lane for jobs on tensors of ``device``."""
    return HostLane() if device.type == "cpu" else StreamLane(device)


def _fulfil(future: Future[Tensor], job: Callable[[], Tensor]) -> None:
    try:
        with torch.no_grad():
            result = job()
    except Exception as error:
        future.set_exception(error)  # type: ignore[no-untyped-call]
    else:
        future.set_result(result)
