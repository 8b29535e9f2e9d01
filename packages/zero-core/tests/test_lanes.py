"""Lanes: jobs run beside the caller, in order, and what they raise reaches whoever waits."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from zero_core.collectives import wait
from zero_core.errors import CollectiveError
from zero_core.lanes import HostLanes, StreamLanes

LIMIT_S = 20.0


def _fail() -> None:
    raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")


def test_a_job_runs_while_its_caller_goes_on() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        assert may_end.wait(LIMIT_S)

    work = HostLanes().launch(job, is_reduction=False)
    assert begun.wait(LIMIT_S)  # nobody waits for the job yet
    may_end.set()
    work.wait()
    work.wait()  # as often as one likes


def test_jobs_of_one_lane_run_in_order_and_the_lanes_do_not_wait_for_each_other() -> None:
    lanes, log, may_go = HostLanes(), [], threading.Event()

    def slow() -> None:
        assert may_go.wait(LIMIT_S)
        log.append("gather 0")

    gathers = [lanes.launch(slow, is_reduction=False)]
    gathers += [
        lanes.launch(lambda i=i: log.append(f"gather {i}"), is_reduction=False) for i in (1, 2, 3)
    ]
    lanes.launch(lambda: log.append("reduction"), is_reduction=True).wait()
    assert log == ["reduction"]
    may_go.set()
    for work in reversed(gathers):
        work.wait()
    assert log == ["reduction", "gather 0", "gather 1", "gather 2", "gather 3"]


@pytest.mark.parametrize("is_reduction", [False, True])
def test_a_job_launched_by_a_job_of_the_same_lane_runs_at_once(is_reduction: bool) -> None:
    lanes, log = HostLanes(), []

    def outer() -> None:
        lanes.launch(lambda: log.append("inner"), is_reduction=is_reduction).wait()
        log.append("outer")

    work = lanes.launch(outer, is_reduction=is_reduction)
    thread = threading.Thread(target=work.wait, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert log == ["inner", "outer"]


def test_what_a_job_raises_is_raised_to_whoever_waits_and_the_lane_goes_on() -> None:
    lanes, done = HostLanes(), []
    failed = lanes.launch(_fail, is_reduction=True)
    following = lanes.launch(lambda: done.append(1), is_reduction=True)
    following.wait()
    assert done == [1]
    for _ in range(2):
        with pytest.raises(CollectiveError, match=r"unit 3 failed or timed out: Connection closed"):
            wait(failed, lambda: "rank 0: all_gather of unit 3")

    def mistaken() -> None:
        raise ValueError("message of rank 1: its scale is not finite")

    with pytest.raises(ValueError, match="message of rank 1"):  # not of the transport
        wait(lanes.launch(mistaken, is_reduction=True), lambda: "rank 0: all_gather of unit 3")


def test_a_job_has_the_modes_of_its_caller_and_no_gradients() -> None:
    lanes, seen = HostLanes(), []

    def look() -> None:
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    lanes.launch(look, is_reduction=False).wait()
    with torch.inference_mode():
        buffer = torch.zeros(3)
        lanes.launch(look, is_reduction=False).wait()
        lanes.launch(lambda: buffer.add_(1), is_reduction=False).wait()
    assert seen == [(False, False), (True, False)]
    assert buffer.tolist() == [1.0, 1.0, 1.0]


def test_threads_end_with_the_lanes_and_hold_nothing_in_between() -> None:
    lanes, is_gone = HostLanes(), threading.Event()
    buffer = torch.zeros(5)
    weakref.finalize(buffer, is_gone.set)
    lanes.launch(partial(buffer.add_, 1), is_reduction=False).wait()
    lanes.launch(lambda: None, is_reduction=True).wait()
    del buffer
    assert is_gone.wait(LIMIT_S)
    threads = list(lanes._threads.values())
    assert len(threads) == 2
    del lanes
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()


class _Stream:
    """Records what is enqueued; the one that is entered last is the current one."""

    current: list[_Stream]
    log: list[str]

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_stream(self, other: _Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.log.append(f"{self.name} records")
        return f"the event of {self.name}"

    def __enter__(self) -> _Stream:
        self.current.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.current.pop()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    log: list[str] = []
    _Stream.current, _Stream.log = [_Stream("main")], log
    names = iter(["first lane", "second lane"])
    monkeypatch.setattr(torch, "Stream", lambda device: _Stream(next(names)))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: _Stream.current[-1])
    yield log
    assert [s.name for s in _Stream.current] == ["main"]


def test_streams_wait_for_the_caller_before_a_job_and_for_the_job_where_it_is_waited_for(
    streams: list[str],
) -> None:
    lanes = StreamLanes(torch.device("cuda", 0))

    def job() -> None:
        streams.append(f"job on {_Stream.current[-1].name}")

    gather = lanes.launch(job, is_reduction=False)
    reduction = lanes.launch(job, is_reduction=True)
    with _Stream("reader"):
        gather.wait()
    reduction.wait()
    lanes.launch(job, is_reduction=False)
    assert streams == [
        "first lane waits for main",
        "job on first lane",
        "first lane records",
        "second lane waits for main",
        "job on second lane",
        "second lane records",
        "reader waits for the event of first lane",
        "main waits for the event of second lane",
        "first lane waits for main",
        "job on first lane",
        "first lane records",
    ]


def test_what_a_job_on_a_stream_raises_is_raised_to_whoever_waits(streams: list[str]) -> None:
    work = StreamLanes(torch.device("cuda", 0)).launch(_fail, is_reduction=False)
    with pytest.raises(RuntimeError, match="Connection closed"):
        work.wait()
