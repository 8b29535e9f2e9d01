"""Communication queues that run jobs asynchronously, in a thread or on an accelerator stream.

[Note: ordering of streams]
A queue runs one job after another. On a host the queue is one thread. On an accelerator the calling
thread launches the job's kernels on the queue's stream. The stream first waits for the caller's
current stream, which writes the job's input. A thread that waits for the future makes its current
stream wait for the job. The caller must keep a job's memory alive until then.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

import torch
from torch import Tensor
from torch.futures import Future


class HostQueue:
    """Runs jobs in one thread, which ends when the queue is deleted.

    After a failed job no other job runs, because the other ranks may be in a different job.
    """

    def __init__(self) -> None:
        self._starts: SimpleQueue[Future[None] | None] = SimpleQueue()
        self._failures: list[Exception] = []
        # A daemon thread, because a lost peer must not prevent this process from ending.
        thread = Thread(target=_serve, args=(self._starts,), name="zero-comm queue", daemon=True)
        thread.start()

    def run(self, job: Callable[[], Tensor]) -> Future[Tensor]:
        """Queue ``job``. The future has the job's result, or raises the job's error."""
        start: Future[None] = Future()
        failures = self._failures

        def run(_: Future[None]) -> Tensor:
            if failures:
                first = f"{type(failures[0]).__name__}: {failures[0]}"
                raise RuntimeError(f"not run, as an earlier one failed: {first}")
            try:
                with torch.no_grad():
                    return job()
            except Exception as error:
                failures.append(error)
                raise

        # A callback instead of set_exception, because DDP sees only callbacks' errors.
        done: Future[Tensor] = start.then(run)
        self._starts.put(start)
        return done

    def __del__(self) -> None:
        self._starts.put(None)


class StreamQueue:
    """Runs jobs on one stream of an accelerator. See [Note: ordering of streams]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device, priority=-1)

    def run(self, job: Callable[[], Tensor]) -> Future[Tensor]:
        """Launch ``job`` after the work of the current stream. Launch errors are raised at once."""
        future: Future[Tensor] = Future(devices=[self._device])
        # The caller's stream may still write the job's input.
        self._stream.wait_event(torch.accelerator.current_stream(self._device).record_event())
        with self._stream, torch.no_grad():
            # set_result records the future's event on the current stream, which is the queue's.
            future.set_result(job())
        return future


CommQueue = HostQueue | StreamQueue


def open_queue(device: torch.device) -> CommQueue:
    return HostQueue() if device.type == "cpu" else StreamQueue(device)


def _serve(starts: SimpleQueue[Future[None] | None]) -> None:
    while (start := starts.get()) is not None:
        start.set_result(None)
