"""The control group's collectives among hosts: as torch's, and safe where ranks differ in them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from zero_core.comm.host import HostLibrary
from zero_core.comm.p2p import ProcessMessages
from zero_core.comm.topology import find_ranks
from zero_core.errors import CollectiveError
from zero_core.testing import spawn

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int16, torch.int64, torch.bool)


def _drawn(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 9, (numel,), generator=generator).to(dtype)


def _as_torch_does(rank: int, world_size: int) -> None:
    library = HostLibrary(ProcessMessages(None), rank=rank, world_size=world_size)
    for dtype in DTYPES:
        for numel in (0, 1, 7, 40_000):
            own = _drawn(rank, numel, dtype)
            everybody = [_drawn(r, numel, dtype) for r in range(world_size)]
            out = torch.empty(world_size * numel, dtype=dtype)
            library.all_gather(out, own).wait()
            assert torch.equal(out, torch.cat(everybody))
            for source in range(world_size):
                value = own.clone()
                library.broadcast(value, source=source).wait()
                assert torch.equal(value, everybody[source])
            if dtype.is_floating_point or dtype is torch.int64:
                found, expected = own.clone(), own.clone()
                library.all_reduce(found).wait()
                dist.all_reduce(expected)
                assert torch.equal(found, expected)
    single = torch.tensor(float(rank))
    library.all_reduce(single).wait()
    assert single.item() == sum(range(world_size))


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_they_do_what_torchs_do(world_size: int) -> None:
    spawn(_as_torch_does, world_size)


def _slices(rank: int, world_size: int) -> None:
    library = HostLibrary(ProcessMessages(None), rank=rank, world_size=world_size)
    sent = [(3 * rank + target) % 4 for target in range(world_size)]
    received = [(3 * source + rank) % 4 for source in range(world_size)]
    parts = torch.arange(sum(sent)) + 100 * rank
    found, expected = (torch.empty(sum(received), dtype=torch.int64) for _ in range(2))
    library.exchange(found, parts, sent, received).wait()
    dist.all_to_all_single(expected, parts, received, sent)
    assert torch.equal(found, expected)


def test_slices_of_different_lengths_arrive_by_source() -> None:
    spawn(_slices, 5)


def _diverge(rank: int, world_size: int) -> None:
    control = find_ranks(None, None).limited(0.5).connect(0.3)
    control.barrier()
    own = torch.zeros(8 if rank == 0 else 4096)
    with pytest.raises(CollectiveError, match=rf"rank {rank}: control exchange \(gather of"):
        control.gather(own)


def test_exchanges_of_different_sizes_raise_on_every_rank() -> None:
    spawn(_diverge, 3)


def _make_more(rank: int, world_size: int) -> None:
    ranks = find_ranks(None, None)
    controls = [ranks.connect() for _ in range(1 + rank)]
    assert controls[-1].gather_bytes(str(rank).encode()) == [b"0", b"1", b"2"]


def test_rank_that_has_made_more_control_groups_meets_the_others() -> None:
    """As where a build failed on it alone."""
    spawn(_make_more, 3)
