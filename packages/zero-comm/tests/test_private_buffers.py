"""The pool of byte buffers, and the order of work on device streams."""

import pytest
import torch

from zero_comm.buffers import BufferPool, follow, mark

CPU = torch.device("cpu")


def test_a_returned_buffer_is_used_again() -> None:
    pool = BufferPool(CPU)
    first = pool.take(100)
    pool.give(first, None)
    assert pool.take(60) is first


def test_buffers_out_at_once_are_distinct() -> None:
    pool = BufferPool(CPU)
    first = pool.take(100)
    assert pool.take(100).data_ptr() != first.data_ptr()


def test_the_smallest_buffer_that_fits_is_taken() -> None:
    pool = BufferPool(CPU)
    buffers = [pool.take(n) for n in (300, 100, 200)]
    for buffer in buffers:
        pool.give(buffer, None)
    assert pool.take(150) is buffers[2]


def test_a_buffer_that_is_too_small_makes_room_for_a_larger_one() -> None:
    pool = BufferPool(CPU)
    pool.give(pool.take(100), None)
    large = pool.take(500)
    pool.give(large, None)
    assert pool.free_nbytes == 500


def test_a_cpu_needs_no_events() -> None:
    assert mark(CPU) is None
    follow(None, CPU)


class RecordingStream:
    """Stands for a device's current stream."""

    def __init__(self) -> None:
        self.log: list[object] = []

    def record_event(self) -> str:
        self.log.append("record")
        return "event"

    def wait_event(self, event: object) -> None:
        self.log.append(event)


def test_a_reused_buffer_waits_for_its_last_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = RecordingStream()
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream)
    pool = BufferPool(torch.device("meta"))
    buffer = pool.take(100)
    assert stream.log == []
    pool.give(buffer, mark(torch.device("meta")))
    assert pool.take(100) is buffer
    assert stream.log == ["record", "event"]
