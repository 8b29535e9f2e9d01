"""Hosts exchange directly: the sums and units of torch.distributed, whoever shares memory."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zero_core
from zero_core.comm.control import LibraryControlGroup
from zero_core.comm.groups import ProcessLibrary
from zero_core.comm.host import HostCollectives
from zero_core.comm.p2p import ProcessMessages
from zero_core.comm.shared_memory import SharedMemory, read_card
from zero_core.errors import CollectiveError
from zero_core.protocols import Work
from zero_core.testing import batch, make_model, spawn

NUMEL = 96  # of a shard
CPU = torch.device("cpu")


def _connect(rank: int, world_size: int, far: set[int]) -> tuple[HostCollectives, SharedMemory]:
    """Collectives; ranks in ``far`` share memory with nobody, as if they were on other hosts."""
    control = LibraryControlGroup(
        ProcessLibrary(None, rank=rank, world_size=world_size, device=CPU), CPU
    )
    shared = SharedMemory(control)
    assert shared.peers == set(range(world_size)) - {rank}
    near = shared.peers - far if rank not in far else frozenset[int]()
    shared.peers = frozenset(near)
    messages = ProcessMessages(None)
    return HostCollectives(messages, rank=rank, world_size=world_size, shared=shared), shared


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
            work.acknowledge().wait()
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
        work.acknowledge().wait()


def test_gradients_stay_until_the_slowest_rank_has_read_them() -> None:
    spawn(_refill, 3)


def _start_gather(direct: HostCollectives, shared: SharedMemory) -> tuple[Work, Tensor]:
    """A gather of two ranks, and where it ends up; its memory has not been read from before."""
    shard = shared.zeros(NUMEL, torch.float32).fill_(direct.rank + 1.0)
    out = torch.zeros(2 * NUMEL)
    return direct.all_gather(out, shard, unit=0, version=0, backward=False), out


def _ends_first(rank: int, world_size: int, how: str) -> None:
    """Rank 1 has done its part of a gather and goes, before rank 0 reads its memory."""
    direct, shared = _connect(rank, world_size, set())
    pids = [torch.empty(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    work, out = _start_gather(direct, shared)
    if rank == 1:
        work.wait()
        if how == "is killed":
            os._exit(0)
        del work, direct, shared
        gc.collect()  # it waits for no reader: this one waits for it
        if how == "drops":
            dist.barrier()
            dist.barrier()
        return
    if how == "drops":
        dist.barrier()
    else:
        while _is_alive(int(pids[1])):
            time.sleep(0.01)
    work.wait()
    assert torch.equal(out, torch.tensor([1.0, 2.0]).repeat_interleave(NUMEL))
    if how == "drops":
        dist.barrier()


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):  # it has been waited for meanwhile
        return False
    return state.rpartition(")")[2].split()[0] not in ("Z", "X")


@pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux only")
@pytest.mark.parametrize("how", ["drops", "ends", "is killed"])
def test_bytes_can_be_read_by_a_late_rank_when_their_owner(how: str) -> None:
    spawn(_ends_first, 2, how)


# Whole processes: rank 0 reads when rank 1 has ended, or is gone.
ENDS_AS_A_PROGRAM = """
import atexit, multiprocessing, os, sys, time
from pathlib import Path
import torch, torch._dynamo, torch.distributed as dist
atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
import zero_core
from zero_core.comm.shared_memory import SharedMemory, read_card
from zero_core.testing import Case, make_model

read = SharedMemory.at

def run(rank):
    store = dist.FileStore(sys.argv[2], 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    engine = zero_core.build(make_model(), Case(stage=3).config())
    pids = [torch.empty(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))

    def read_late(shared, peer, offset, numel, dtype):
        stat = Path(f"/proc/{pids[1].item()}/stat")
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX":
            time.sleep(0.01)
        return read(shared, peer, offset, numel, dtype)

    if rank == 0:
        SharedMemory.at = read_late
    with torch.no_grad():
        found = engine.module.embed(torch.arange(5)).sum().item()  # one gather, the first
    print("found", found, flush=True)

if sys.argv[1] == "programs":
    other = os.fork()  # after the imports; either ends as a program does
    run(0 if other else 1)
    if other:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
else:
    ranks = [multiprocessing.get_context("fork").Process(target=run, args=(r,)) for r in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(max(rank.exitcode != 0 for rank in ranks))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux only")
@pytest.mark.parametrize("how", ["programs", "forked"])
def test_program_that_ends_with_a_gather_ends_well_on_all_ranks(how: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDS_AS_A_PROGRAM, how, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    # Gloo of torch 2.10 prints lines of its own.
    first, second = (line for line in done.stdout.splitlines() if line.startswith("found "))
    assert first == second


def _keeps_descriptors(rank: int, world_size: int) -> None:
    """A mapped window keeps one descriptor; buffers carved from it need none."""
    direct, shared = _connect(rank, world_size, set())
    for _ in range(3):
        work, out = _start_gather(direct, shared)
        work.wait()
        assert torch.equal(out, torch.tensor([1.0, 2.0]).repeat_interleave(NUMEL))
    links = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    assert sum("memfd:zero_core" in link for link in links) == world_size


@pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux only")
def test_buffers_need_no_descriptor_of_their_own_when_windows_are_mapped() -> None:
    spawn(_keeps_descriptors, 2)


def _is_sealed(rank: int, world_size: int) -> None:
    _, shared = _connect(rank, world_size, set())
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    windows = [path for path in paths if "memfd:zero_core" in os.path.realpath(path)]
    assert len(windows) == world_size
    for path in windows:
        with pytest.raises(PermissionError):
            os.truncate(path, 0)
    (peer,) = shared.peers
    size = mmap.PAGESIZE
    for offset in (-4, 2, 2**62):
        with pytest.raises(CollectiveError, match=f"rank {peer} sent rank {rank} the offset"):
            shared.at(peer, offset, size, torch.float32)


@pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux only")
def test_no_rank_can_cut_memory_that_others_have_mapped_or_send_them_beyond_it() -> None:
    spawn(_is_sealed, 2)


@pytest.mark.parametrize(
    "row",
    [
        *(b"", b"3", b"{}", b"[]", b"[" * 100_000, b"\xff", b"null"),
        *(b'[1, 3, 4096, "00", "x"]', b'[0, 3, 4096, "%s", "x"]' % (b"0" * 32)),
        *(b'[1, -3, 1, "%s", ""]' % (b"0" * 32), b'[1, 3, -1, "%s", ""]' % (b"0" * 32)),
        *(b'[1, 3, 1, "%s", ""]' % (b"g" * 32), b'[true, 3, 1, "%s", ""]' % (b"0" * 32)),
    ],
)
def test_wrong_description_of_a_window_is_refused_with_the_rank(row: bytes) -> None:
    with pytest.raises(CollectiveError, match="rank 5 sent"):
        read_card(row, 5)


def _asks_too_much(rank: int, world_size: int) -> None:
    _, shared = _connect(rank, world_size, set())
    with pytest.raises(CollectiveError, match=r"rank \d: no more shared memory: \d+ bytes asked"):
        shared.zeros(2**46, torch.float32)
    small = shared.zeros(3, torch.float32)
    assert small.untyped_storage().nbytes() < mmap.PAGESIZE  # what torch.save would write


@pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux only")
def test_memory_is_refused_in_words_when_a_window_is_full() -> None:
    spawn(_asks_too_much, 2)


def _has_no_memfd(rank: int, world_size: int) -> None:
    if rank == 1:
        del os.memfd_create
    control = LibraryControlGroup(
        ProcessLibrary(None, rank=rank, world_size=world_size, device=CPU), CPU
    )
    assert SharedMemory(control).peers == ({0, 2} - {rank} if rank != 1 else set())


def test_python_without_memfd_shares_nothing() -> None:
    spawn(_has_no_memfd, 3)


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
        far = HostCollectives(ProcessMessages(None), rank=rank, world_size=world_size)
        expected = _run(zero_core.build(make_model(), config, collectives=far))
        for name, value in _run(zero_core.build(make_model(), config)).items():
            assert torch.equal(value, expected[name]), name


def test_an_engine_gives_the_same_bits_with_and_without_shared_memory() -> None:
    spawn(_without_shared_memory, 3)


def _leaves_messages(rank: int, world_size: int) -> None:
    left, late, value = torch.zeros(4), torch.zeros(4), torch.zeros(1)
    if rank == 0:
        messages = ProcessMessages(None)
        messages.isend(left, 1, tag=5)
        messages.irecv(late, 1, tag=6)
        del messages
        gc.collect()
    dist.barrier()
    messages = ProcessMessages(None)
    works = []
    if rank == 1:
        works = [messages.irecv(left, 0, tag=5), messages.isend(late + 1, 0, tag=6)]
    works.append(messages.irecv(value, 1 - rank, tag=7))
    works.append(messages.isend(torch.full((1,), 10.0 + rank), 1 - rank, tag=7))
    for work in works:
        work.wait()
    assert value == 11.0 - rank
    assert late[0] == 1 - rank


def test_messages_that_nobody_waits_for_do_not_block_later_ones() -> None:
    spawn(_leaves_messages, 2)


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
