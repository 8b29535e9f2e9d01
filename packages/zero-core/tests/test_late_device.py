"""The device that is not there keeps what it promises: the CPU's bits, later, and CUDA's traps."""

import ctypes
import math
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing import ProcessExitedException

from zero_core.comm.device_library import Lane
from zero_core.testing import late_device, run_alone, simulate

DEVICE = "late:1"


def on_late(test: Callable[[], None]) -> None:
    run_alone(_load_and_run, test)


def _load_and_run(test: Callable[[], None]) -> None:
    late_device.load()
    test()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 50, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def _train(
    device: str, dtype: torch.dtype, **kind: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = Transformer().to(dtype)
    tokens = torch.randint(50, (4, 2, 9)).to(device)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **kind)
    losses = []
    for batch in tokens:
        loss = model(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [x.cpu() for x in losses], [x.detach().cpu() for x in model.parameters()]


def _trains() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for kind in ({"foreach": False}, {"foreach": True}, {"fused": True}):
            late_device.set_delays(seed=1, kernel_s=0)
            expected = _train("cpu", dtype, **kind)
            late_device.set_delays(seed=1, kernel_s=1e-4)
            torch.testing.assert_close(_train(DEVICE, dtype, **kind), expected, rtol=0, atol=0)


def test_a_transformer_trains_to_the_bits_of_the_cpu() -> None:
    on_late(_trains)


def _runs_ahead() -> None:
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


def test_the_host_runs_ahead_until_it_waits() -> None:
    on_late(_runs_ahead)


def _streams() -> None:
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


def test_a_missing_wait_or_record_stream_shows() -> None:
    on_late(_streams)


def _events() -> None:
    first, second = torch.Stream(DEVICE), torch.Stream(DEVICE)
    x = torch.zeros(1, device=DEVICE)
    torch.accelerator.synchronize(DEVICE)
    start, end = torch.Event(DEVICE, enable_timing=True), torch.Event(DEVICE, enable_timing=True)
    second.wait_event(start)  # never recorded: no wait
    late_device.set_delays(kernel_s=0.1)
    with first:
        start.record()
        x.fill_(3)
        end.record()
    second.wait_event(end)
    with first:
        end.record()  # a later record does not matter to a wait before it
    with second:
        y = x + 1
    late_device.set_delays()
    second.synchronize()
    with second:
        assert y.item() == 4
    first.synchronize()
    assert start.elapsed_time(end) >= 0


def test_a_wait_is_for_the_last_record_before_it() -> None:
    on_late(_events)


def _pinned() -> None:
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


def test_only_pinned_copies_do_not_block() -> None:
    on_late(_pinned)


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


def _memory() -> None:
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


def test_memory_is_counted_and_limited() -> None:
    on_late(_memory)


def _errors() -> None:
    table = torch.zeros(3, 2, device=DEVICE)
    _ = table[torch.tensor([7], device=DEVICE)]  # the host does not see the index
    with pytest.raises(RuntimeError, match=r"late:1: aten::index.* failed.*out of (bounds|range)"):
        torch.accelerator.synchronize(DEVICE)
    torch.accelerator.synchronize(DEVICE)  # raised once
    with pytest.raises(RuntimeError, match="late:1 and late:2"):
        _ = table + torch.zeros(3, 2, device="late:2")


def test_an_error_in_a_job_is_raised_by_the_next_synchronization() -> None:
    on_late(_errors)


def _threads() -> None:
    torch.accelerator.set_device_index(2)
    found: list[Any] = []

    def look() -> None:
        found.append(torch.accelerator.current_device_index())
        torch.zeros(1, device="late:3")

    thread = threading.Thread(target=look)
    late_device.forget_contexts()
    thread.start()
    thread.join()
    assert found == [0]
    assert late_device.contexts() == [3]


def test_the_device_of_a_new_thread_is_0() -> None:
    on_late(_threads)


def _traces() -> None:
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


def test_a_trace_tells_what_touched_which_memory() -> None:
    on_late(_traces)


def _random_numbers() -> None:
    torch.manual_seed(3)
    state = torch.get_device_module("late").get_rng_state(DEVICE)
    first = torch.rand(5, device=DEVICE)
    second = torch.rand(5, device=DEVICE)
    assert not torch.equal(first.cpu(), second.cpu())
    torch.get_device_module("late").set_rng_state(state, DEVICE)
    assert torch.equal(F.dropout(torch.ones(5), 0.0), torch.ones(5))
    assert torch.equal(torch.rand(5, device=DEVICE).cpu(), first.cpu())
    own = torch.Generator(DEVICE).manual_seed(3)
    assert torch.equal(torch.rand(5, device=DEVICE, generator=own).cpu(), first.cpu())


def test_random_numbers_follow_the_seed() -> None:
    on_late(_random_numbers)


def _stacks() -> None:
    x = torch.ones(1, device=DEVICE)
    late_device.reset_counters(with_stacks=True)
    x.item()
    ((kind, stack),) = late_device.counters(1).stacks
    assert kind == "item"
    assert "_stacks" in stack


def test_a_synchronization_tells_where_it_came_from() -> None:
    on_late(_stacks)


def test_no_compiler_is_a_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RuntimeError, match="needs a C\\+\\+20 compiler"):
        late_device.load()


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


def _exchanges() -> None:
    late_device.set_delays(seed=5, kernel_s=1e-2, copy_s=1e-2)
    for size in (1, 2, 3):
        found = simulate(_exchange, size, device="late")
        own = [torch.arange(4.0) + 10 * rank for rank in range(size)]
        for rank in range(size):
            swapped = [float(rank + 10 * peer) for peer in range(size)]
            expected = [torch.cat(own).tolist(), swapped, sum(own).tolist(), own[-1].tolist()]
            assert found[rank] == expected


def test_collectives_run_beside_the_host() -> None:
    on_late(_exchanges)


def _differ(ranks: Any) -> None:
    x = torch.zeros(4, device=ranks.device)
    if ranks.rank == 0:
        ranks.library().all_reduce(x).wait()
    else:
        ranks.library().broadcast(x, source=0).wait()


def _is_alone(ranks: Any) -> None:
    if ranks.rank == 1:
        ranks.library().all_reduce(torch.zeros(4, device=ranks.device)).wait()


def _fails(ranks: Any) -> None:
    if ranks.rank == 0:
        raise ValueError("rank 0 has had enough")
    ranks.library().all_reduce(torch.zeros(4, device=ranks.device)).wait()


def _mismatches() -> None:
    with pytest.raises(RuntimeError, match=r"rank 0 starts all_reduce .*, rank 1 broadcast of 16"):
        simulate(_differ, 2, device="late")
    with pytest.raises(RuntimeError, match=r"rank 1 of ranks waited 0.5 s .* for ranks 0"):
        simulate(_is_alone, 2, device="late", timeout_s=0.5)
    with pytest.raises(ValueError, match="enough"):
        simulate(_fails, 2, device="late")


def test_ranks_that_start_different_collectives_are_named() -> None:
    on_late(_mismatches)
