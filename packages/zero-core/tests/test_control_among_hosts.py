"""Collectives of the control group across hosts: torch's results, and errors on a mismatch."""

import pytest
import torch
import torch.distributed as dist

import zero_core
from zero_core.comm.control import ControlGroup
from zero_core.comm.groups import ProcessLibrary, Ranks
from zero_core.comm.host import HostLibrary
from zero_core.comm.p2p import ProcessMessages
from zero_core.comm.topology import find_ranks
from zero_core.errors import CollectiveError
from zero_core.testing import Case, make_tower, spawn

CPU = torch.device("cpu")
SUMMED = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
# All dtypes must work, although gloo does not support some of these.
DTYPES = (*SUMMED, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn)


def _drawn(rank, numel, dtype):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 9, (numel,), generator=generator).to(dtype)


def _is_equal(found, expected):
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def _as_torch_does(rank, world_size):
    hosts = HostLibrary(ProcessMessages(None), rank=rank, world_size=world_size)
    _check(hosts, rank, world_size, is_of_hosts=True)
    torchs = ProcessLibrary(Ranks(None, rank, world_size, CPU))
    _check(torchs, rank, world_size, is_of_hosts=False)


def _check(library, rank, world_size, *, is_of_hosts):
    for dtype in DTYPES:
        for numel in (0, 1, 7, 40_000) if is_of_hosts else (1, 7, 40_000):
            own = _drawn(rank, numel, dtype)
            everybody = [_drawn(r, numel, dtype) for r in range(world_size)]
            out = torch.empty(world_size * numel, dtype=dtype)
            library.all_gather(out, own).wait()
            assert _is_equal(out, torch.cat(everybody))
            if not is_of_hosts:
                library.all_to_all(out, out.clone()).wait()
                assert _is_equal(out, torch.cat([everybody[rank]] * world_size))
            for source in range(world_size):
                value = own.clone()
                library.broadcast(value, source=source).wait()
                assert _is_equal(value, everybody[source])
            if dtype in SUMMED:
                found, expected = own.clone(), own.clone()
                library.all_reduce(found).wait()
                dist.all_reduce(expected)
                assert torch.equal(found, expected)
    single = torch.tensor(float(rank))
    library.all_reduce(single).wait()
    assert single.item() == sum(range(world_size))
    sent = [(3 * rank + target) % 4 for target in range(world_size)]
    received = [(3 * source + rank) % 4 for source in range(world_size)]
    parts = torch.arange(sum(sent)) + 100 * rank
    found, expected = (torch.empty(sum(received), dtype=torch.int64) for _ in range(2))
    library.exchange(found, parts, sent, received).wait()
    dist.all_to_all_single(expected, parts, received, sent)
    assert torch.equal(found, expected)
    control = ControlGroup(library, CPU)
    assert torch.equal(control.exchange(parts, sent, received), expected)


@pytest.mark.parametrize("world_size", [2, 5])
def test_libraries_do_what_torchs_collectives_do(world_size):
    spawn(_as_torch_does, world_size)


def _differ(rank, world_size):
    ranks = find_ranks(None, None)
    # Rank r connects r + 1 times, as after builds that failed on some ranks only.
    controls = [ranks.connect() for _ in range(1 + rank)]
    assert controls[-1].gather_bytes(str(rank).encode()) == [b"0", b"1", b"2"]
    control = ranks.limited(0.5).connect(0.3)
    control.barrier()
    own = torch.zeros(8 if rank == 0 else 4096)
    with pytest.raises(CollectiveError, match=rf"rank {rank}: control exchange \(gather of"):
        control.gather(own)


def test_ranks_meet_whatever_groups_they_made_and_exchanges_of_different_sizes_raise():
    spawn(_differ, 3)


def _build_alone(rank, world_size):
    if rank > 0:
        find_ranks(None, None).connect()  # like a build() that fails after its first connection
        return
    with pytest.raises(CollectiveError, match=r"control exchange .* in build\(\)"):
        zero_core.build(make_tower(1), Case(top={"collective_timeout_s": 1.0}).config())


def test_a_rank_that_others_do_not_follow_into_build_says_so():
    spawn(_build_alone, 2)
