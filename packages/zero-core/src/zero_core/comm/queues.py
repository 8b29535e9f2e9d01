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
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from zero_core.protocols import Work

_Job = Callable[[], None]


class HostQueues:
    """A thread per queue. The threads end when this object does."""

    def __init__(self) -> None:
        self._queues: dict[bool, SimpleQueue[_Result | None]] = {}
        self._threads: dict[bool, threading.Thread] = {}
        self._lock = threading.Lock()

    def launch(self, job: _Job, *, is_reduction: bool) -> Work:
        """Run ``job`` in the queue's thread. From a job of that queue, at once."""
        result = _Result(job, is_inference=torch.is_inference_mode_enabled())
        if threading.current_thread() is self._threads.get(is_reduction):
            result.run()  # queued, it would wait for the job that waits for it
            return result
        with self._lock:
            if is_reduction not in self._queues:
                queue: SimpleQueue[_Result | None] = SimpleQueue()
                name = "zero_core reductions" if is_reduction else "zero_core gathers"
                # Daemons: a peer that is gone must not keep this process from ending.
                thread = threading.Thread(target=_serve, args=(queue,), name=name, daemon=True)
                self._queues[is_reduction] = queue
                self._threads[is_reduction] = thread
                thread.start()
        self._queues[is_reduction].put(result)
        return result

    def __del__(self) -> None:
        for queue in self._queues.values():
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
        result = _Result(job)
        current = torch.accelerator.current_stream(self._device)
        if current == stream:  # launched by a job of this queue; torch 2.10 enters no stream twice
            result.run()
        else:
            # The queue waits for what the caller has enqueued: the job reads it.
            stream.wait_stream(current)
            with stream:
                result.run()
        return _Enqueued(result, stream.record_event(), self._device)


CommQueues = HostQueues | StreamQueues


def queues_of(device: torch.device) -> CommQueues:
    return HostQueues() if device.type in ("cpu", "meta") else StreamQueues(device)


@dataclass(eq=False)
class _Result:
    """A job and its outcome.

    torch's modes are a thread's own, and buffers made in inference mode are written only in it. So
    a job for another thread says whether its caller ``is_inference``; None keeps all modes.
    """

    job: _Job | None
    is_inference: bool | None = None
    error: BaseException | None = None
    is_done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        job, self.job = self.job, None  # what it holds is free when it is done
        assert job is not None
        try:
            if self.is_inference is None:
                job()
            else:
                with torch.inference_mode(self.is_inference), torch.no_grad():
                    job()
        except BaseException as error:  # whoever waits must hear of it
            self.error = error
        finally:
            self.is_done.set()

    def wait(self) -> None:
        """Wait for the job. Raise what it raised, at each call."""
        self.is_done.wait()
        if self.error is not None:
            raise self.error


@dataclass(eq=False)
class _Enqueued:
    """A job whose operations are all on its stream."""

    result: _Result
    done: torch.Event
    device: torch.device

    def wait(self) -> None:
        """Have the caller's current stream wait for the job: it reads what the job wrote."""
        self.result.wait()
        torch.accelerator.current_stream(self.device).wait_event(self.done)


def _serve(queue: SimpleQueue[_Result | None]) -> None:
    while True:
        result = queue.get()
        if result is None:
            return
        result.run()
        del result  # a thread at rest keeps no buffer and no process group alive
