"""Queues of collectives: order of the jobs, threads and streams, and what a job raises."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from zero_core.comm.queues import HostQueues, StreamQueues

LIMIT_S = 20.0


def _fail() -> None:
    raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")


def test_jobs_of_one_queue_run_in_order_and_the_queues_do_not_wait_for_each_other() -> None:
    queues, log, may_go = HostQueues(), [], threading.Event()

    def slow() -> None:
        assert may_go.wait(LIMIT_S)
        log.append("gather 0")

    gathers = [queues.launch(slow, is_reduction=False)]
    gathers += [
        queues.launch(lambda i=i: log.append(f"gather {i}"), is_reduction=False) for i in (1, 2, 3)
    ]
    queues.launch(lambda: log.append("reduction"), is_reduction=True).wait()
    assert log == ["reduction"]
    may_go.set()
    for work in reversed(gathers):
        work.wait()
    assert log == ["reduction", "gather 0", "gather 1", "gather 2", "gather 3"]


@pytest.mark.parametrize("is_reduction", [False, True])
def test_a_job_launched_by_a_job_of_the_same_queue_runs_at_once(is_reduction: bool) -> None:
    queues, log = HostQueues(), []

    def outer() -> None:
        queues.launch(lambda: log.append("inner"), is_reduction=is_reduction).wait()
        log.append("outer")

    work = queues.launch(outer, is_reduction=is_reduction)
    thread = threading.Thread(target=work.wait, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert log == ["inner", "outer"]


def test_a_job_has_the_modes_of_its_caller_and_no_gradients() -> None:
    queues, seen = HostQueues(), []

    def look() -> None:
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    queues.launch(look, is_reduction=False).wait()
    with torch.inference_mode():
        buffer = torch.zeros(3)
        queues.launch(look, is_reduction=False).wait()
        queues.launch(lambda: buffer.add_(1), is_reduction=False).wait()
    assert seen == [(False, False), (True, False)]
    assert buffer.tolist() == [1.0, 1.0, 1.0]


def test_threads_end_with_the_queues_and_hold_nothing_in_between() -> None:
    queues, is_gone = HostQueues(), threading.Event()
    buffer = torch.zeros(5)
    weakref.finalize(buffer, is_gone.set)
    queues.launch(partial(buffer.add_, 1), is_reduction=False).wait()
    queues.launch(lambda: None, is_reduction=True).wait()
    del buffer
    assert is_gone.wait(LIMIT_S)
    threads = list(queues._threads.values())
    assert len(threads) == 2
    del queues
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


class _Stream:
    """A stream that logs what is enqueued on it. The one entered last is current."""

    current: list[_Stream]
    log: list[str]

    def __init__(self, name: str, priority: int = 0) -> None:
        self.name = name
        self.priority = priority

    def wait_stream(self, other: _Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.log.append(f"{self.name} records")
        return f"the event of {self.name}"

    def __enter__(self) -> _Stream:
        assert self not in self.current, "torch 2.10 does not enter a stream twice"
        self.current.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.current.pop()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    log: list[str] = []
    _Stream.current, _Stream.log = [_Stream("main")], log
    names = iter(["first queue", "second queue"])
    monkeypatch.setattr(torch, "Stream", lambda device, priority: _Stream(next(names), priority))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: _Stream.current[-1])
    yield log
    assert [s.name for s in _Stream.current] == ["main"]


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("is_on_host", [True, False])
def test_a_failed_job_raises_for_each_waiter_and_the_queue_continues(is_on_host: bool) -> None:
    queues = HostQueues() if is_on_host else StreamQueues(torch.device("cuda", 0))
    done: list[int] = []
    failed = queues.launch(_fail, is_reduction=True)
    queues.launch(lambda: done.append(1), is_reduction=True).wait()
    assert done == [1]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Connection closed"):
            failed.wait()


def test_streams_of_high_priority_wait_for_the_caller_and_readers_for_the_job(
    streams: list[str],
) -> None:
    queues = StreamQueues(torch.device("cuda", 0))

    def job() -> None:
        assert _Stream.current[-1].priority == -1
        streams.append(f"job on {_Stream.current[-1].name}")

    gather = queues.launch(job, is_reduction=False)
    reduction = queues.launch(job, is_reduction=True)
    with _Stream("reader"):
        gather.wait()
    reduction.wait()
    # A job may launch another of its queue.
    queues.launch(lambda: queues.launch(job, is_reduction=False).wait(), is_reduction=False).wait()
    on_first = ["first queue waits for main", "job on first queue", "first queue records"]
    assert streams == [
        *on_first,
        *(text.replace("first", "second") for text in on_first),
        "reader waits for the event of first queue",
        "main waits for the event of second queue",
        *on_first,
        "first queue waits for the event of first queue",
        "first queue records",
        "main waits for the event of first queue",
    ]
