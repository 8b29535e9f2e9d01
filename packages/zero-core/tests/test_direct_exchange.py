"""Direct exchange between hosts: torch.distributed's results, whichever ranks share memory."""

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

from zero_core.comm.control import LibraryControlGroup
from zero_core.comm.groups import ProcessLibrary
from zero_core.comm.host import HostCollectives
from zero_core.comm.p2p import ProcessMessages
from zero_core.comm.shared_memory import SharedMemory, read_card
from zero_core.errors import CollectiveError
from zero_core.protocols import Work
from zero_core.testing import Case, run_engine, spawn

NUMEL = 96  # of a shard
CPU = torch.device("cpu")
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux only")


def _connect(rank: int, world_size: int) -> tuple[HostCollectives, SharedMemory]:
    control = LibraryControlGroup(
        ProcessLibrary(None, rank=rank, world_size=world_size, device=CPU), CPU
    )
    shared = SharedMemory(control)
    assert shared.peers == set(range(world_size)) - {rank}
    messages = ProcessMessages(None)
    return HostCollectives(messages, rank=rank, world_size=world_size, shared=shared), shared


def _refill(rank: int, world_size: int) -> None:
    direct, shared = _connect(rank, world_size)
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
    """Start a gather of two ranks from newly allocated memory. Returns its work and its output."""
    shard = shared.zeros(NUMEL, torch.float32).fill_(direct.rank + 1.0)
    out = torch.zeros(2 * NUMEL)
    return direct.all_gather(out, shard, unit=0, version=0, backward=False), out


def _ends_first(rank: int, world_size: int, how: str) -> None:
    """End rank 1 after its part of a gather, before rank 0 reads its memory."""
    direct, shared = _connect(rank, world_size)
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


@ON_LINUX
@pytest.mark.parametrize("how", ["drops", "ends", "is killed"])
def test_bytes_can_be_read_by_a_late_rank_when_their_owner(how: str) -> None:
    spawn(_ends_first, 2, how)


# Whole processes: rank 0 reads when rank 1 has ended, or is gone.
ENDS_AS_A_PROGRAM = """
import atexit, os, sys, time
from pathlib import Path
import torch, torch._dynamo, torch.distributed as dist
atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
import zero_core
from zero_core.comm.shared_memory import SharedMemory
from zero_core.testing import Case, make_model

read = SharedMemory.at

def run(rank):
    store = dist.FileStore(sys.argv[1], 2)
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

other = os.fork()  # after the imports; either ends as a program does
run(0 if other else 1)
if other:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


@pytest.mark.slow
@ON_LINUX
def test_program_that_ends_with_a_gather_ends_well_on_all_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDS_AS_A_PROGRAM, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    # Gloo of torch 2.10 prints lines of its own.
    first, second = (line for line in done.stdout.splitlines() if line.startswith("found "))
    assert first == second


def _windows() -> list[str]:
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return [path for path in paths if "memfd:zero_core" in os.path.realpath(path)]


def _maps_windows(rank: int, world_size: int) -> None:
    direct, shared = _connect(rank, world_size)
    for _ in range(3):
        work, out = _start_gather(direct, shared)
        work.wait()
        assert torch.equal(out, torch.tensor([1.0, 2.0]).repeat_interleave(NUMEL))
    assert len(_windows()) == world_size  # buffers carved from one need no descriptor
    for path in _windows():
        with pytest.raises(PermissionError):
            os.truncate(path, 0)
    (peer,) = shared.peers
    for offset in (-4, 2, 2**62):
        with pytest.raises(CollectiveError, match=f"rank {peer} sent rank {rank} the offset"):
            shared.at(peer, offset, mmap.PAGESIZE, torch.float32)
    with pytest.raises(CollectiveError, match=r"rank \d: no more shared memory: \d+ bytes asked"):
        shared.zeros(2**46, torch.float32)
    small = shared.zeros(3, torch.float32)
    assert small.untyped_storage().nbytes() < mmap.PAGESIZE  # what torch.save would write


@ON_LINUX
def test_a_window_takes_one_descriptor_and_cannot_be_cut_or_left_or_overfilled() -> None:
    spawn(_maps_windows, 2)


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


def _has_no_memfd(rank: int, world_size: int) -> None:
    if rank == 1:
        del os.memfd_create
    control = LibraryControlGroup(
        ProcessLibrary(None, rank=rank, world_size=world_size, device=CPU), CPU
    )
    assert SharedMemory(control).peers == ({0, 2} - {rank} if rank != 1 else set())


def test_python_without_memfd_shares_nothing() -> None:
    spawn(_has_no_memfd, 3)


def _check_same_bits(rank: int, stage: int, collectives: Any) -> None:
    expected = run_engine(Case(stage), rank, 3)
    found = run_engine(Case(stage), rank, 3, collectives=collectives)
    assert found.losses == expected.losses
    torch.testing.assert_close(found.values, expected.values, rtol=0.0, atol=0.0)


def _without_shared_memory(rank: int, world_size: int) -> None:
    for stage in range(4):
        far = HostCollectives(ProcessMessages(None), rank=rank, world_size=world_size)
        _check_same_bits(rank, stage, far)


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
    """A decorator's work that offers only ``wait``, and delays it."""

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
        self.all_gather = native.all_gather

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> Work:
        return _Slow(self._native.reduce_scatter(out, full, unit=unit), self._delay_s)


def _decorate(rank: int, world_size: int) -> None:
    for stage in (1, 3):
        _check_same_bits(rank, stage, lambda native, **_: _Decorated(native, rank))


def test_a_decorator_that_only_waits_gives_the_same_bits() -> None:
    spawn(_decorate, 2)


def _disagree(rank: int, world_size: int) -> None:
    direct, shared = _connect(rank, world_size)
    full = shared.zeros(2 * NUMEL, torch.float32 if rank == 0 else torch.bfloat16)
    work = direct.reduce_scatter(torch.empty(NUMEL), full, unit=0)
    with pytest.raises(CollectiveError, match=r"expects \d+ bytes of rank"):
        work.wait()


def test_ranks_that_exchange_different_dtypes_are_told() -> None:
    spawn(_disagree, 2)
