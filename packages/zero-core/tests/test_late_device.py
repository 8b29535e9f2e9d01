"""The device that is not there keeps what it promises: the CPU's bits, later, and CUDA's traps."""

import ctypes
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import ProcessExitedException

from zero_core.comm.device_library import Lane
from zero_core.testing import late_device, run_alone, simulate

DEVICE = "late:1"


def _load_and_run(test: Callable[[], None]) -> None:
    late_device.load()
    test()


def _the_host_runs_ahead_until_it_waits() -> None:
    torch.accelerator.set_device_index(1)
    x = torch.zeros(4, device=DEVICE)
    late_device.reset_counters()
    event = torch.Event(DEVICE)
    with late_device.held("kernels"):
        for _ in range(4):
            x.add_(1)
        event.record()
        assert not event.query()
        assert late_device.counters(1).syncs == {}
    event.synchronize()
    assert x.tolist() == [4.0] * 4
    counted = late_device.counters(1)
    assert counted.by_op["aten::add"] == 4
    assert counted.syncs == {"event": 1, "copy": 1}


def _a_missing_wait_or_record_stream_shows() -> None:
    side = torch.Stream(DEVICE, priority=-1)
    source = torch.arange(1000.0, device=DEVICE)
    out = torch.zeros(1000, device=DEVICE)
    torch.accelerator.synchronize(DEVICE)

    def use(*, waits: bool, records: bool, late: Any) -> bool:
        main = torch.accelerator.current_stream(DEVICE)
        with late_device.held(late):
            value = source * 2
            if waits:
                side.wait_stream(main)
            with side:
                out.copy_(value)
            if records:
                value.record_stream(side)
            del value
            for _ in range(3):  # takes the freed memory, in order
                _ = source * 3
            (main if late == "copies" else side).synchronize()  # all but what is held
        torch.accelerator.synchronize(DEVICE)
        return torch.equal(out.cpu(), torch.arange(1000.0) * 2)

    torch.accelerator.set_device_index(1)
    assert use(waits=True, records=True, late="copies")
    assert not use(waits=True, records=False, late="copies")
    assert not use(waits=False, records=True, late="kernels")


def _only_pinned_copies_do_not_block() -> None:
    host = torch.arange(100.0).pin_memory()
    assert host.is_pinned()
    assert not torch.zeros(1).is_pinned()
    late_device.reset_counters()
    with late_device.held("copies"):
        device = host.to(DEVICE, non_blocking=True)
        address = host.data_ptr()
        del host
        other = torch.zeros(100, pin_memory=True)  # not the memory that the copy still reads
        assert other.data_ptr() != address
        assert late_device.counters(1).syncs == {}
    assert device.tolist() == list(range(100))
    late_device.reset_counters()
    torch.zeros(100).to(DEVICE, non_blocking=True)  # not pinned
    device.to("cpu", non_blocking=False)
    device.to("cpu", torch.float64, non_blocking=True)  # another dtype
    assert late_device.counters(1).syncs["copy"] == 3


def _touches(said: str) -> None:
    late_device.load()
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    ctypes.string_at(torch.zeros(1, device=DEVICE).data_ptr(), 4)


def test_the_host_may_not_touch_device_memory(tmp_path: Path) -> None:
    said = tmp_path / "stderr"
    with pytest.raises(ProcessExitedException) as died:
        run_alone(_touches, str(said))
    assert died.value.exit_code == -signal.SIGSEGV
    assert "the host touched memory of late:1" in said.read_text(encoding="utf-8")


def _memory_is_counted_and_limited() -> None:
    accelerator = torch.accelerator
    accelerator.set_device_index(1)
    x = torch.empty(1 << 20, device=DEVICE)
    assert math.isnan(x[7].item())  # new memory is no zeros
    before = accelerator.memory_allocated(1)
    y = x + 1
    assert accelerator.memory_allocated(1) - before == y.nbytes
    del y
    assert accelerator.max_memory_allocated(1) - before == x.nbytes
    accelerator.reset_peak_memory_stats(1)
    assert accelerator.max_memory_allocated(1) == before
    late_device.set_capacity(64 << 20)
    assert accelerator.get_memory_info(1)[1] == 64 << 20
    with pytest.raises(torch.OutOfMemoryError, match="of 67108864"):
        torch.empty(128 << 20, device=DEVICE)
    del x
    accelerator.empty_cache()
    assert accelerator.memory_reserved(1) == 0


def _an_error_in_a_job_is_raised_by_the_next_synchronization() -> None:
    table = torch.zeros(3, 2, device=DEVICE)
    _ = table[torch.tensor([7], device=DEVICE)]  # the host does not see the index
    with pytest.raises(RuntimeError, match=r"late:1: aten::index.* failed.*out of (bounds|range)"):
        torch.accelerator.synchronize(DEVICE)
    torch.accelerator.synchronize(DEVICE)  # raised once
    with pytest.raises(RuntimeError, match="late:1 and late:2"):
        _ = table + torch.zeros(3, 2, device="late:2")


def _a_trace_tells_what_touched_which_memory() -> None:
    x = torch.zeros(8, device=DEVICE)
    stream, event = torch.Stream(DEVICE), torch.Event(DEVICE)
    late_device.start_trace()
    x.add_(1)
    event.record(torch.accelerator.current_stream(DEVICE))
    stream.wait_event(event)
    with stream:
        y = x.clone()
    stream.synchronize()
    del y
    records = late_device.stop_trace()
    kinds = [record.kind for record in records]
    assert kinds == [
        "launch",
        "event_record",
        "event_wait",
        "alloc",
        "launch",
        "stream_synchronize",
        "free",
    ]
    add, recorded, waited, _, copy, _, _ = records
    begin = x.data_ptr()
    assert (add.name, add.device, add.stream) == ("aten::add", 1, 0)
    assert add.writes == [(begin, begin + x.nbytes)]
    assert (recorded.event, recorded.version) == (waited.event, waited.version)
    assert (copy.stream, copy.reads) == (stream.stream_id, [(begin, begin + x.nbytes)])


def _exchange(ranks: Any) -> list[list[float]]:
    library = ranks.library()
    size, rank, device = ranks.size, ranks.rank, ranks.device
    own = torch.arange(4.0, device=device) + 10 * rank
    out = torch.empty(4 * size, dtype=torch.float32, device=device)
    late_device.reset_counters()
    library.all_gather(out, own).wait()
    parts = torch.arange(float(size), device=device) + 10 * rank
    swapped = torch.empty_like(parts)
    library.subgroup(range(size), Lane.REDUCTIONS).all_to_all(swapped, parts).wait()
    total = own.clone()
    library.all_reduce(total).wait()
    library.broadcast(own, source=size - 1).wait()
    assert late_device.counters(rank).syncs == {}  # the host waited for nothing
    return [tensor.tolist() for tensor in (out, swapped, total, own)]


def _collectives_run_beside_the_host() -> None:
    late_device.set_delays(seed=5, kernel_s=1e-2, copy_s=1e-2)
    for size in (1, 2, 3):
        found = simulate(_exchange, size, device="late")
        own = [torch.arange(4.0) + 10 * rank for rank in range(size)]
        for rank in range(size):
            swapped = [float(rank + 10 * peer) for peer in range(size)]
            expected = [torch.cat(own).tolist(), swapped, sum(own).tolist(), own[-1].tolist()]
            assert found[rank] == expected


@pytest.mark.parametrize(
    "promise",
    [
        _the_host_runs_ahead_until_it_waits,
        _a_missing_wait_or_record_stream_shows,
        _only_pinned_copies_do_not_block,
        _memory_is_counted_and_limited,
        _an_error_in_a_job_is_raised_by_the_next_synchronization,
        _a_trace_tells_what_touched_which_memory,
        _collectives_run_beside_the_host,
    ],
    ids=lambda promise: promise.__name__.strip("_"),
)
def test_the_device_keeps_its_promise(promise: Callable[[], None]) -> None:
    run_alone(_load_and_run, promise)
