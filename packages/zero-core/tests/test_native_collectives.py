"""The engine's collectives among nodes: gathers, sums, all-to-alls, subgroups and queued jobs."""

import itertools
import time

import pytest
import torch
import torch.distributed as dist
from support.hosts import CPU, connect

from zero_core.comm.device import DeviceCollectives
from zero_core.comm.groups import ProcessLibrary, Ranks
from zero_core.comm.host import HostCollectives
from zero_core.comm.meter import Links, Meter
from zero_core.comm.p2p import ProcessMessages
from zero_core.comm.queues import HostQueues
from zero_core.testing import on_processes

NUMEL = 37  # elements of a shard: prime, so that nothing divides evenly
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8)


def _values(numel, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, (numel,), generator=generator).to(dtype)


def _gathers(native, seed):
    """Gather a unit from shared memory and one from private memory. Wait in reverse order."""
    size = native.world_size
    for turn, dtype in enumerate(DTYPES):
        works, outs = [], []
        for unit, is_shared in enumerate((True, False)):
            shard = (
                native.zeros(NUMEL, dtype, CPU) if is_shared else torch.empty(NUMEL, dtype=dtype)
            )
            shard.copy_(_values(NUMEL, dtype, seed + 100 * unit + turn + 10 * native.rank))
            outs.append(torch.empty(size * NUMEL, dtype=dtype))
            works.append(
                native.all_gather(outs[-1], shard, unit=unit, version=turn, backward=False)
            )
        for work in reversed(works):
            work.wait()
        for unit, out in enumerate(outs):
            parts = [_values(NUMEL, dtype, seed + 100 * unit + turn + 10 * r) for r in range(size)]
            assert torch.equal(out, torch.cat(parts)), (dtype, unit)


def _swaps(native, seed):
    """Check all_to_all, where slice ``k`` of rank ``r`` holds the ``_values`` of (r, k)."""
    size = native.world_size
    for dtype in DTYPES:
        for is_shared in (True, False):
            numel = size * NUMEL
            parts = native.zeros(numel, dtype, CPU) if is_shared else torch.empty(numel).to(dtype)
            for k, part in enumerate(parts.view(size, -1)):
                part.copy_(_values(NUMEL, dtype, seed + 10 * native.rank + k))
            out = torch.empty_like(parts)
            native.all_to_all(out, parts, unit=4).wait()
            expected = [_values(NUMEL, dtype, seed + 10 * r + native.rank) for r in range(size)]
            assert torch.equal(out, torch.cat(expected)), (dtype, is_shared)


def _late_readers(native):
    """Reuse a sent buffer after wait(), while one rank is slow to read it."""
    size, rank = native.world_size, native.rank
    parts, out = native.zeros(size * NUMEL, torch.float32, CPU), torch.empty(size * NUMEL)
    for turn in range(3):
        parts.fill_(10.0 * turn + rank)
        work = native.all_to_all(out, parts, unit=2)
        if rank == turn % size:
            time.sleep(0.05)
        work.wait()
        parts.fill_(-1.0)
        expected = torch.arange(size).repeat_interleave(NUMEL) + 10.0 * turn
        assert torch.equal(out, expected)
        parts.fill_(float(turn + 1))
        total = torch.empty(NUMEL)
        reduction = native.reduce_scatter(total, parts, unit=2)
        if rank == turn % size:
            time.sleep(0.05)
        reduction.wait()
        assert torch.equal(total, torch.full((NUMEL,), float(size * (turn + 1))))
        if hasattr(reduction, "acknowledge"):
            reduction.acknowledge().wait()


def _sums(native):
    size = native.world_size
    for dtype, is_shared in itertools.product(DTYPES[:3], (True, False)):
        numel = size * NUMEL
        full = native.zeros(numel, dtype, CPU) if is_shared else torch.empty(numel, dtype=dtype)
        full.copy_(_values(numel, torch.float32, native.rank) - 50)
        wide = torch.promote_types(dtype, torch.float32)
        expected = full.to(wide, copy=True)
        dist.all_reduce(expected)
        out = torch.empty(NUMEL, dtype=wide)
        work = native.reduce_scatter(out, full, unit=1)
        work.wait()
        if hasattr(work, "contributions"):
            assert torch.equal(sum(part.to(wide) for part in work.contributions), out)
            work.acknowledge().wait()
        full.zero_()
        assert torch.equal(out, expected.view(size, -1)[native.rank])


def _jobs(native):
    """Exchange in three subgroups at once, on both queues and on the calling thread."""
    size, rank = native.world_size, native.rank
    stride = 2 if size % 2 == 0 else size
    within = native.subgroup(range(rank // stride * stride, (rank // stride + 1) * stride))
    across = native.subgroup(range(rank % stride, size, stride))
    turned = native.subgroup([*reversed(range(size))])
    assert (within.rank, across.rank) == (rank % stride, rank // stride)
    assert turned.rank == size - 1 - rank
    found = {}

    def gather(group, name):
        out = torch.empty(group.world_size * NUMEL)
        shard = group.zeros(NUMEL, torch.float32, CPU).fill_(float(rank))
        group.all_gather(out, shard, unit=0, version=1, backward=False).wait()
        found[name] = out.view(-1, NUMEL).mean(1)

    def swap(group, name):
        parts, out = torch.full((group.world_size,), float(rank)), torch.empty(group.world_size)
        group.all_to_all(out, parts, unit=0).wait()
        found[name] = out

    works = []
    for turn in range(3):
        works += [
            native.launch(lambda t=turn: gather(within, f"within {t}"), is_reduction=False),
            native.launch(lambda t=turn: swap(within, f"swap within {t}"), is_reduction=True),
            native.launch(lambda t=turn: gather(across, f"across {t}"), is_reduction=False),
            native.launch(lambda t=turn: swap(across, f"swap across {t}"), is_reduction=True),
            # Subgroups share the queues of the whole group.
            native.launch(lambda t=turn: gather(native, f"all {t}"), is_reduction=False),
        ]
        gather(turned, f"turned {turn}")
    for work in reversed(works):
        work.wait()
    near = torch.arange(rank // stride * stride, (rank // stride + 1) * stride).float()
    far = torch.arange(rank % stride, size, stride).float()
    whole = torch.arange(size).float()
    expected = {"within": near, "swap within": near, "across": far, "swap across": far}
    expected |= {"all": whole, "turned": whole.flip(0)}
    for (name, values), turn in itertools.product(expected.items(), range(3)):
        assert torch.equal(found[f"{name} {turn}"], values)


def _refusals(native):
    size = native.world_size
    for ranks in ([], [native.rank, native.rank], [native.rank, size], [native.rank + 1]):
        with pytest.raises(ValueError, match=r"subgroup: \[.*different ranks below"):
            native.subgroup(ranks)
    for out, parts in (
        (torch.empty(size), torch.empty(2 * size)),
        (torch.empty(size), torch.empty(size, dtype=torch.float64)),
        (torch.empty(size * 2 - 1), torch.empty(size * 2 - 1)) if size > 1 else (None, None),
    ):
        if out is not None and parts is not None:
            with pytest.raises(ValueError, match=f"all_to_all.*{size} equal slices"):
                native.all_to_all(out, parts, unit=0)


def _twins(rank, world_size):
    """Gather with two sets of collectives over one group. Rank 0 uses the reverse order."""
    messages, meter = ProcessMessages(None), Meter(Links(world_size, world_size, is_ring=False))
    twins = [HostCollectives(messages, rank, None, HostQueues(), meter) for _ in range(2)]
    outs = [torch.empty(world_size) for _ in twins]
    works = []
    for i in (1, 0) if rank == 0 else (0, 1):
        shard = torch.tensor([10.0 * i + rank])
        works.append(twins[i].all_gather(outs[i], shard, unit=0, version=0, backward=False))
    for work in works:
        work.wait()
    assert [out.tolist() for out in outs] == [
        [10.0 * i + r for r in range(world_size)] for i in (0, 1)
    ]


def _check(native):
    _gathers(native, seed=0)
    _swaps(native, seed=3)
    _late_readers(native)
    _sums(native)
    _refusals(native)


@pytest.mark.parametrize(
    ("world_size", "per_node"),
    [(1, 1), (3, 1), (3, 3), (4, 2), pytest.param(6, 3, marks=pytest.mark.slow)],
)
@on_processes()
def test_hosts_exchange_what_torch_distributed_would(ranks, per_node):
    rank, world_size = ranks.rank, ranks.size
    native, _ = connect(rank, world_size, per_node)
    _check(native)
    _jobs(native)
    if world_size > per_node > 1:  # groups that do not match the nodes
        size = per_node + 1
        group = native.subgroup(range(size) if rank < size else range(size, world_size))
        _gathers(group, seed=7 * group.world_size)
        _swaps(group, seed=7 * group.world_size)
    _twins(rank, world_size)
    if world_size > 1:  # other ranks may still read this rank's shard
        dist.barrier()


@on_processes(4)
def test_a_library_exchanges_the_same(ranks):
    rank = ranks.rank
    meter = Meter(Links(4, 2, is_ring=True))
    library = ProcessLibrary(Ranks(None, rank, 4, CPU))
    native = DeviceCollectives(library, HostQueues(), meter)
    _check(native)
    halves = native.subgroup(range(rank // 2 * 2, rank // 2 * 2 + 2))
    _gathers(halves, seed=50 * (rank // 2))
    _swaps(halves, seed=50 * (rank // 2))
    alone = native.subgroup([rank])
    _gathers(alone, seed=rank)
