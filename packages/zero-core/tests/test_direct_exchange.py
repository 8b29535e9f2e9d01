"""Hosts exchange directly: the sums and units of torch.distributed, whoever shares memory."""

from __future__ import annotations

import gc
import logging
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zero_core
from zero_core.collectives import ControlGroup
from zero_core.direct import DirectCollectives
from zero_core.errors import CollectiveError
from zero_core.protocols import Work
from zero_core.shared_memory import SharedMemory
from zero_core.testing import batch, make_model, spawn

NUMEL = 96  # of a shard


def _connect(rank: int, world_size: int, far: set[int]) -> tuple[DirectCollectives, SharedMemory]:
    """Collectives; ranks in ``far`` share memory with nobody, as if they were on other hosts."""
    control = ControlGroup(None, rank=rank, world_size=world_size, device=torch.device("cpu"))
    shared = SharedMemory(control)
    assert shared.peers == set(range(world_size)) - {rank}
    near = shared.peers - far if rank not in far else frozenset[int]()
    shared.peers = frozenset(near)
    return DirectCollectives(None, rank=rank, world_size=world_size, shared=shared), shared


def _values(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-50, 50, (numel,), generator=generator).to(dtype)


def _exchange(rank: int, world_size: int, far: set[int]) -> None:
    direct, shared = _connect(rank, world_size, far)
    for turn, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64, torch.uint8)):
        for is_shared in (True, False):
            make: Any = shared.zeros if is_shared else torch.zeros
            shard = make(NUMEL, dtype=dtype)
            shard.copy_(_values(NUMEL, dtype, 10 * turn + rank))
            out = torch.empty(world_size * NUMEL, dtype=dtype)
            works = [
                direct.all_gather(out, shard, unit=turn, version=1, backward=False),
                # Another unit at the same time, of ordinary memory.
                direct.all_gather(out.clone(), shard.clone(), unit=9, version=1, backward=False),
            ]
            for work in reversed(works):
                work.wait()
            expected = torch.cat([_values(NUMEL, dtype, 10 * turn + r) for r in range(world_size)])
            assert torch.equal(out, expected)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for is_shared in (True, False):
            make: Any = shared.zeros if is_shared else torch.zeros
            full = make(world_size * NUMEL, dtype=dtype)
            full.copy_(_values(world_size * NUMEL, dtype, rank))
            wide = torch.promote_types(dtype, torch.float32)
            expected = full.to(wide, copy=True)
            dist.all_reduce(expected)
            mine = torch.empty(NUMEL, dtype=wide)
            work = direct.reduce_scatter(mine, full, unit=0)
            work.wait()
            parts = list(work.contributions)
            assert torch.equal(sum(part.to(wide) for part in parts), mine)
            work.retire()()
            full.zero_()
            assert torch.equal(mine, expected.view(world_size, -1)[rank])


@pytest.mark.parametrize(
    ("world_size", "far"), [(1, set()), (2, set()), (3, set()), (3, {2}), (3, {0, 1, 2})], ids=str
)
def test_units_and_sums_are_those_of_torch_distributed(world_size: int, far: set[int]) -> None:
    spawn(_exchange, world_size, far)


def _refill(rank: int, world_size: int) -> None:
    direct, shared = _connect(rank, world_size, set())
    full = shared.zeros(world_size * NUMEL, torch.float32)
    for turn in range(5):
        full.fill_(float(turn + 1))
        out = torch.empty(NUMEL)
        work = direct.reduce_scatter(out, full, unit=0)
        if rank == turn % world_size:
            time.sleep(0.05)  # the others are done, and would write over what this rank reads
        work.wait()
        assert torch.equal(out, torch.full((NUMEL,), float(world_size * (turn + 1))))
        work.retire()()


def test_gradients_stay_until_the_slowest_rank_has_read_them() -> None:
    spawn(_refill, 3)


def _ends_first(rank: int, world_size: int, folder: str) -> None:
    """Rank 1 has done its part of a gather and is gone when rank 0 looks at the bytes."""
    direct, shared = _connect(rank, world_size, set())
    shard = shared.zeros(NUMEL, torch.float32).fill_(rank + 1.0)
    out = torch.zeros(world_size * NUMEL)
    work = direct.all_gather(out, shard, unit=0, version=0, backward=False)
    own_pid = Path(folder, "pid")
    if rank == 1:
        own_pid.write_text(str(os.getpid()))
        work.wait()
        os._exit(0)
    while not own_pid.exists() or _is_alive(own_pid.read_text()):
        time.sleep(0.01)
    work.wait()
    assert torch.equal(out, torch.tensor([1.0, 2.0]).repeat_interleave(NUMEL))


def _is_alive(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, IndexError):
        return False
    return state != "Z"  # nobody has taken note of its end yet


@pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux only")
def test_bytes_can_be_read_when_their_rank_has_ended(tmp_path: Path) -> None:
    spawn(_ends_first, 2, str(tmp_path))


def _frees_first(rank: int, world_size: int) -> None:
    """Rank 1 drops its memory, and takes new memory, before rank 0 looks."""
    direct, shared = _connect(rank, world_size, set())
    shard = shared.zeros(NUMEL, torch.float32).fill_(rank + 1.0)
    out = torch.zeros(world_size * NUMEL)
    work = direct.all_gather(out, shard, unit=0, version=0, backward=False)
    if rank == 1:
        work.wait()
        del direct, shared, shard, work
        gc.collect()
        kept = [torch.full((NUMEL,), 7.0) for _ in range(50)]
        dist.barrier()
        del kept
        return
    dist.barrier()
    work.wait()
    assert torch.equal(out, torch.tensor([1.0, 2.0]).repeat_interleave(NUMEL))


def test_bytes_can_be_read_when_their_rank_has_freed_them() -> None:
    spawn(_frees_first, 2)


def _keeps_one(rank: int, world_size: int) -> None:
    direct, shared = _connect(rank, world_size, set())
    assert len(_mapped()) > world_size
    kept, dropped = (shared.zeros(NUMEL, torch.float32) for _ in range(2))
    dist.barrier()
    del direct, shared, dropped
    gc.collect()
    (line,) = _mapped()
    first, last = (int(address, 16) for address in line.split()[0].split("-"))
    assert first <= kept.data_ptr() < last
    dist.barrier()


def _mapped() -> list[str]:
    """The lines of ``/proc/self/maps`` with memory of this rank or of a peer."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "/memfd:zero_core" in line]


@pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux only")
def test_memory_that_outlives_the_rest_keeps_none_of_it() -> None:
    spawn(_keeps_one, 3)


def _is_limited(rank: int, world_size: int) -> None:
    """Rank 1 may not reserve addresses: nobody shares memory with it, and it says why."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zero_core").addHandler(handler)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_AS, (16 * 2**30, resource.RLIM_INFINITY))
    control = ControlGroup(None, rank=rank, world_size=world_size, device=torch.device("cpu"))
    shared = SharedMemory(control)
    assert shared.peers == {0, 1, 2} - {1, rank} if rank != 1 else not shared.peers
    assert ["ulimit -v unlimited" in record for record in records] == [True] * (rank == 1)
    out = torch.zeros(world_size * NUMEL)
    direct = DirectCollectives(None, rank=rank, world_size=world_size, shared=shared)
    shard = direct.zeros(NUMEL, torch.float32, torch.device("cpu")).fill_(rank)
    direct.all_gather(out, shard, unit=0, version=0, backward=False).wait()
    assert torch.equal(out, torch.arange(3.0).repeat_interleave(NUMEL))


@pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux only")
def test_rank_that_cannot_share_memory_says_why_and_takes_part() -> None:
    spawn(_is_limited, 3)


def _asks_for_too_much(rank: int, world_size: int) -> None:
    _, shared = _connect(rank, world_size, set())
    with pytest.raises(CollectiveError, match="no more shared memory"):
        shared.zeros(2**47, torch.uint8)
    assert shared.zeros(3, torch.int16).tolist() == [0, 0, 0]


def test_more_shared_memory_than_there_is_is_refused() -> None:
    spawn(_asks_for_too_much, 2)


def _run(engine: zero_core.Engine) -> dict[str, Tensor]:
    for step in range(3):
        engine.backward(engine(**batch(step, 0, engine.rank))["loss"])
        engine.step()
    return engine.full_state_dict()


def _without_shared_memory(rank: int, world_size: int) -> None:
    for stage in range(4):
        config = {
            "train_micro_batch_size_per_gpu": 3,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        }
        far = DirectCollectives(None, rank=rank, world_size=world_size)
        expected = _run(zero_core.build(make_model(), config, collectives=far))
        for name, value in _run(zero_core.build(make_model(), config)).items():
            assert torch.equal(value, expected[name]), name


def test_an_engine_gives_the_same_bits_with_and_without_shared_memory() -> None:
    spawn(_without_shared_memory, 3)


class _Slow:
    """Works of a decorator that knows of nothing but ``wait``; the last rank is late."""

    def __init__(self, work: Work, delay_s: float) -> None:
        self._work = work
        self._delay_s = delay_s

    def wait(self) -> None:
        time.sleep(self._delay_s)
        self._work.wait()


class _Decorated:
    def __init__(self, native: Any, rank: int) -> None:
        self._native = native
        self._delay_s = 0.02 * rank

    def all_gather(self, out: Tensor, shard: Tensor, **further: Any) -> Work:
        work: Work = self._native.all_gather(out, shard, **further)
        return work

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        return _Slow(self._native.reduce_scatter(out, full, unit=unit), self._delay_s)


def _decorate(rank: int, world_size: int) -> None:
    for stage in (1, 3):
        config = {
            "train_micro_batch_size_per_gpu": 3,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        }
        expected = _run(zero_core.build(make_model(), config))
        engine = zero_core.build(
            make_model(), config, collectives=lambda native, **_: _Decorated(native, rank)
        )
        for name, value in _run(engine).items():
            assert torch.equal(value, expected[name]), name


def test_a_decorator_that_only_waits_gives_the_same_bits() -> None:
    spawn(_decorate, 2)


def _disagree(rank: int, world_size: int) -> None:
    direct, shared = _connect(rank, world_size, set())
    full = shared.zeros(2 * NUMEL, torch.float32 if rank == 0 else torch.bfloat16)
    work = direct.reduce_scatter(torch.empty(NUMEL), full, unit=0)
    with pytest.raises(CollectiveError, match=r"expects \d+ bytes of rank"):
        work.wait()


def test_ranks_that_exchange_different_dtypes_are_told() -> None:
    spawn(_disagree, 2)
