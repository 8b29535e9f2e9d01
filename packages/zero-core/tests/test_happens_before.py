"""The happens-before checker reports what is not ordered, and nothing else."""

from __future__ import annotations

import pytest

from zero_core.testing.happens_before import HappensBefore

COMPUTE, COPIES = 0, 7
CALLER, WORKER = 100, 200
GRADIENT, STAGING = (4096, 2048), (1 << 20, 2048)
WHOLE, PART = (8192, 4096), (8192 + 2048, 16)
RANGES = [GRADIENT, STAGING, WHOLE, PART]


def _copy_down(
    checker: HappensBefore, *, waits_for_producer: bool = True, synchronizes: bool = True
) -> None:
    """A gradient goes down on a stream of its own, and a worker thread reads it."""
    checker.launch(CALLER, COMPUTE, "backward", writes=[GRADIENT])
    checker.record_event(CALLER, 1, COMPUTE)
    if waits_for_producer:
        checker.wait_event(1, COPIES)
    checker.launch(CALLER, COPIES, "copy down", reads=[GRADIENT], writes=[STAGING])
    checker.record_event(CALLER, 2, COPIES)
    checker.send(CALLER, 5)
    checker.receive(5, WORKER)
    if synchronizes:
        checker.synchronize_event(2, WORKER)
    checker.host_access(WORKER, "Adam", reads=[STAGING])


@pytest.mark.parametrize(
    ("dropped", "races"),
    [
        ({}, []),
        (
            {"waits_for_producer": False},
            [("backward on stream 0", "copy down on stream 7")],
        ),
        ({"synchronizes": False}, [("copy down on stream 7", "Adam in thread 200")]),
    ],
    ids=["nothing", "a wait", "a synchronization"],
)
def test_a_dropped_wait_is_reported(dropped: dict[str, bool], races: list[tuple[str, str]]) -> None:
    checker = HappensBefore(RANGES)
    _copy_down(checker, **dropped)
    assert [(race.first, race.second) for race in checker.races] == races


def test_synchronization_of_one_thread_does_not_order_another() -> None:
    checker = HappensBefore(RANGES)
    _copy_down(checker)
    checker.launch(WORKER, COPIES, "copy up", reads=[STAGING])
    checker.host_access(CALLER, "overwriting", writes=[STAGING])
    assert [race.second for race in checker.races] == ["overwriting in thread 100"] * 2


def test_overlapping_views_are_compared() -> None:
    checker = HappensBefore(RANGES)
    checker.launch(CALLER, COMPUTE, "whole", writes=[WHOLE])
    checker.launch(CALLER, COPIES, "part", reads=[PART])
    assert len(checker.races) == 1


@pytest.mark.parametrize("is_recorded", [False, True])
def test_freed_memory_must_not_have_readers_on_other_streams(is_recorded: bool) -> None:
    checker = HappensBefore(RANGES)
    checker.launch(CALLER, COMPUTE, "backward", writes=[GRADIENT])
    checker.record_event(CALLER, 1, COMPUTE)
    checker.wait_event(1, COPIES)
    checker.launch(CALLER, COPIES, "copy down", reads=[GRADIENT])
    if is_recorded:
        checker.record_stream(GRADIENT, COPIES)
    checker.free(CALLER, COMPUTE, GRADIENT)
    assert bool(checker.races) is not is_recorded


def test_event_stands_for_its_last_record() -> None:
    checker = HappensBefore(RANGES)
    checker.record_event(CALLER, 1, COMPUTE)
    checker.launch(CALLER, COMPUTE, "backward", writes=[GRADIENT])
    checker.wait_event(1, COPIES)
    checker.launch(CALLER, COPIES, "copy down", reads=[GRADIENT])
    assert len(checker.races) == 1


def test_stream_synchronization_orders_the_thread() -> None:
    checker = HappensBefore(RANGES)
    checker.launch(CALLER, COPIES, "copy down", writes=[STAGING])
    checker.synchronize_stream(COPIES, CALLER)
    checker.host_access(CALLER, "reading", reads=[STAGING])
    assert not checker.races
