"""Memory shared by ranks of one host: access rights, lifetime, and mismatched sizes."""

import gc
import mmap
import os
import random
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from support.hosts import connect, control_of

from zero_core.comm.p2p import ProcessMessages
from zero_core.comm.shared_memory import SharedMemory, read_card
from zero_core.comm.watch import process_state
from zero_core.errors import CollectiveError
from zero_core.testing import spawn

NUMEL = 96  # elements of a shard
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="ranks share memory on Linux only")


def _start_gather(direct, shared):
    shard = shared.zeros(NUMEL, torch.float32).fill_(direct.rank + 1.0)
    out = torch.zeros(2 * NUMEL)
    return direct.all_gather(out, shard, unit=0, version=0, backward=False), out


def _ends_first(rank, world_size, how):
    direct, shared = connect(rank, world_size)
    pids = [torch.empty(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    work, out = _start_gather(direct, shared)
    if rank == 1:
        work.wait()
        if how == "is killed":
            os._exit(0)
        del work, direct, shared
        gc.collect()  # must not wait for the reader, which waits for this rank
        if how == "drops":
            dist.barrier()
            dist.barrier()
        return
    if how == "drops":
        dist.barrier()
    else:
        while process_state(int(pids[1])) not in ("Z", "X"):
            time.sleep(0.01)
    work.wait()
    assert torch.equal(out, torch.tensor([1.0, 2.0]).repeat_interleave(NUMEL))
    if how == "drops":
        dist.barrier()


@ON_LINUX
@pytest.mark.parametrize("how", ["drops", "ends", "is killed"])
def test_bytes_can_be_read_by_a_late_rank_when_their_owner(how):
    spawn(_ends_first, 2, how)


def _windows():
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return [path for path in paths if "memfd:zero_core" in os.path.realpath(path)]


def _maps_windows(rank, world_size):
    direct, shared = connect(rank, world_size)
    for _ in range(3):
        work, out = _start_gather(direct, shared)
        work.wait()
        assert torch.equal(out, torch.tensor([1.0, 2.0]).repeat_interleave(NUMEL))
    assert len(_windows()) == world_size  # buffers in one window share its file descriptor
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
    assert small.untyped_storage().nbytes() < mmap.PAGESIZE  # torch.save writes the whole storage
    full = shared.zeros(2 * NUMEL, torch.float32 if rank == 0 else torch.bfloat16)
    with pytest.raises(CollectiveError, match=r"expects \d+ bytes of rank"):
        direct.reduce_scatter(torch.empty(NUMEL), full, unit=0).wait()


@ON_LINUX
def test_a_window_takes_one_descriptor_and_wrong_uses_are_refused():
    spawn(_maps_windows, 2)


@pytest.mark.parametrize(
    "row",
    [
        *(b"", b"3", b"{}", b"[]", b"[" * 100_000, b"\xff", b"null"),
        *(b'[1, 3, 4096, "00", "x", {}]', b'[0, 3, 4096, "SECRET", "x", {}]'),
        *(b'[1, -3, 1, "SECRET", "", {}]', b'[1, 3, -1, "SECRET", "", {}]'),
        *(b'[1, 3, 1, "%s", "", {}]' % (b"g" * 32), b'[true, 3, 1, "SECRET", "", {}]'),
        *(b'[1, 3, 1, "SECRET", "", []]', b'[1, 3, 1, "SECRET", "", {"0": -1}]'),
    ],
)
def test_wrong_description_of_a_window_is_refused_with_the_rank(row):
    read_card(b'[1, 3, 4096, "%s", "x", {"0": 1}]' % (b"0" * 32), 5)
    with pytest.raises(CollectiveError, match="rank 5 sent"):
        read_card(row.replace(b"SECRET", b"0" * 32), 5)


def _has_no_memfd(rank, world_size):
    if rank == 1:
        del os.memfd_create
    assert SharedMemory(control_of(rank, world_size), timeout_s=300).peers == (
        {0, 2} - {rank} if rank != 1 else set()
    )


def test_python_without_memfd_shares_nothing():
    spawn(_has_no_memfd, 3)


def _leaves_messages(rank, world_size):
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


def test_messages_that_nobody_waits_for_do_not_block_later_ones():
    spawn(_leaves_messages, 2)


def _fills_pipes(rank, world_size):
    mailbox = SharedMemory(control_of(rank, world_size), timeout_s=60).mailbox
    peers = [peer for peer in range(world_size) if peer != rank]
    letters = [(n, p, mailbox.expect(p, 3)) for n in range(10_000) for p in peers]
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(mailbox.wait, mailbox.expect(peers[0], 4))  # receives all other letters
        for number, peer, _ in letters:  # posts more than a pipe holds
            mailbox.post(peer, 3, number, rank)
        for number, peer, letter in letters:
            assert mailbox.wait(letter) == (number, peer)
        for peer in peers:
            mailbox.post(peer, 4, 0, 0)
        assert last.result() == (0, 0)
    dist.barrier()


@ON_LINUX
def test_ranks_that_post_more_than_a_pipe_holds_do_not_wait_for_each_other():
    spawn(_fills_pipes, 3)


def _waits_in_threads(rank, world_size):
    mailbox = SharedMemory(control_of(rank, world_size), timeout_s=60).mailbox
    peer, tags = 1 - rank, range(4)
    letters = {tag: [mailbox.expect(peer, tag) for _ in range(200)] for tag in tags}
    with ThreadPoolExecutor(len(tags)) as pool:
        found = pool.map(lambda tag: [mailbox.wait(letter) for letter in letters[tag]], tags)
        for number in range(200):
            for tag in tags:
                mailbox.post(peer, tag, tag, number)
        assert list(found) == [[(tag, number) for number in range(200)] for tag in tags]
    mailbox.post(peer, 9, 1, 2)
    dist.barrier()
    assert mailbox.wait(mailbox.expect(peer, 9)) == (1, 2), "posted before it was expected"
    dist.barrier()


@ON_LINUX
def test_threads_that_wait_beside_each_other_get_their_own_messages():
    spawn(_waits_in_threads, 2)


def _waits_in_vain(rank, world_size):
    control = control_of(rank, world_size)
    hasty, mailbox = (SharedMemory(control, timeout_s=s).mailbox for s in (1, 60))
    if rank == 0:
        with pytest.raises(RuntimeError, match="Timed out: no message of rank 1 for 1 s"):
            hasty.wait(hasty.expect(1, 0))
        letter, never = mailbox.expect(1, 7), [mailbox.expect(1, tag) for tag in (7, 8)]
        dist.barrier()
        started = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            for failed in [pool.submit(mailbox.wait, one) for one in never]:
                with pytest.raises(RuntimeError, match="rank 1 ended or dropped"):
                    failed.result()
        assert time.monotonic() - started < 30
        assert mailbox.wait(letter) == (5, 6), "it was posted by one that has ended since"
        mailbox.post(1, 8, 0, 0)
    else:
        mailbox.post(0, 7, 5, 6)
        if os.fork() == 0:  # like a data loader's worker that outlives its parent
            time.sleep(40)
            os._exit(0)
        dist.barrier()
        os._exit(0)


@ON_LINUX
def test_waiting_for_a_rank_that_ended_or_sends_nothing_fails():
    spawn(_waits_in_vain, 2)


class _Interrupted(Exception):
    pass


def _is_interrupted(rank, world_size):
    is_waiting = False

    def interrupt(signum, frame):
        if is_waiting:  # the kernel may deliver the signal late, in another thread
            raise _Interrupted

    mailbox = SharedMemory(control_of(rank, world_size), timeout_s=60).mailbox
    signal.signal(signal.SIGALRM, interrupt)
    draw, num_interrupts = random.Random(rank), 0
    with ThreadPoolExecutor(1) as pool:
        for number in range(3_000):
            letter = mailbox.expect(1 - rank, 0)
            mailbox.post(1 - rank, 0, number, rank)
            try:
                is_waiting = True
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, 2e-4))
                found = mailbox.wait(letter)
                is_waiting = False
                assert found == (number, 1 - rank)
            except _Interrupted:
                is_waiting, num_interrupts = False, num_interrupts + 1
            if number % 5 == 4:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
                letter = mailbox.expect(1 - rank, 1)
                mailbox.post(1 - rank, 1, number, rank)
                found = pool.submit(mailbox.wait, letter).result()
                assert found == (number, 1 - rank), (
                    "another thread reads in the interrupted one's place"
                )
    assert num_interrupts
    dist.barrier()


@ON_LINUX
def test_waits_that_are_interrupted_lose_no_message_of_another_wait():
    spawn(_is_interrupted, 2)
