"""Two-level reductions on accelerators: results, operator counts and bytes."""

from dataclasses import asdict
from functools import reduce
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zero_core
from zero_core.comm.device import DeviceCollectives
from zero_core.comm.meter import Links, Meter
from zero_core.testing import Case, device_collectives, make_model, simulate, train_steps

NODES = [(4, 2), (6, 2), (6, 3)]
"""(world size, ranks per node)"""


def _full(rank, size, dtype):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size * 64, generator=generator, dtype=torch.float64).to(dtype)


def _sum_by_tree(size, per_node, dtype):
    """Sum over all ranks: left to right within each node, then left to right over the nodes."""
    wide = torch.promote_types(dtype, torch.float32)
    full = [_full(rank, size, dtype).to(wide) for rank in range(size)]
    nodes = [reduce(torch.add, full[at : at + per_node]) for at in range(0, size, per_node)]
    return reduce(torch.add, nodes)


def _reduce(ranks, dtype, culprit):
    device = device_collectives(ranks)
    full = _full(ranks.rank, ranks.size, dtype)
    out = torch.empty(64, dtype=torch.promote_types(dtype, torch.float32))
    work = device.reduce_scatter(out, full.clone(), unit=0)
    work.wait()
    norm = work.norm
    if ranks.rank == culprit:
        full[3] = torch.inf
    spoilt = device.reduce_scatter(torch.empty_like(out), full, unit=0)
    spoilt.wait()
    return out, norm, work.nonfinite, spoilt.nonfinite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("size", "per_node"), [*NODES, (3, 3), (3, 1), (2, 2)])
def test_a_sum_is_taken_by_one_tree(size, per_node, dtype):
    found = simulate(_reduce, size, dtype, size - 1, ranks_per_node=per_node)
    expected = _sum_by_tree(size, per_node, dtype).view(size, -1)
    for (out, norm, nonfinite, _), values in zip(found, expected, strict=True):
        assert torch.equal(out, values)
        assert torch.equal(norm, torch.linalg.vector_norm(values))
        assert not nonfinite.any()
    blamed = torch.stack([spoilt for *_, spoilt in found]).any(0)
    assert torch.nonzero(blamed).flatten().tolist() == [size - 1]


def _send(ranks, config):
    """Return a rank's report of bytes sent in a step, and the bytes of its receive buffers."""
    assert ranks.per_node is not None
    meter = Meter(Links(ranks.size, ranks.per_node, is_ring=True))
    device = device_collectives(ranks, meter)
    engine = zero_core.build(
        make_model(), config, process_group=ranks, collectives=lambda native, **_: device
    )
    train_steps(engine, 0, 1)
    meter.end_step()
    return meter.report(), device.exchange_nbytes


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_plan_counts_both_levels_and_their_buffer(dtype):
    config = Case(stage=2, dtype=dtype).config()
    sent = simulate(_send, 4, config, ranks_per_node=2)
    planned = zero_core.plan(make_model(), config, 4, ranks_per_node=2, device_type="accelerator")
    rows = {(row.collective, row.content): asdict(row) for row in planned.traffic}
    for found, held in sent:
        assert held == planned.memory.device["exchange buffers"]
        (row,) = [asdict(r) for r in found if r.collective == "reduce_scatter"]
        assert row == rows["reduce_scatter", "gradients"]


class _Counter(TorchDispatchMode):
    VIEWS = frozenset({"view", "slice", "select", "unbind", "transpose", "empty", "detach"})

    def __init__(self):
        super().__init__()
        self.operators = []
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if name not in self.VIEWS:
            self.operators.append(str(func))
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            addresses = {x.data_ptr() for x in tensors}
            results = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
            tensors += [x for x in results if x.data_ptr() not in addresses]
            self.num_bytes += sum(x.nbytes for x in tensors)
        return found


def _device(rank, world_size, per_node):
    """Return the collectives of one rank, over a library that moves no data."""

    def library(rank, size):
        def subgroup(ranks, lane):
            return library(list(ranks).index(rank), len(ranks))

        return Mock(rank=rank, world_size=size, subgroup=subgroup)

    def launch(job, *, is_reduction):
        job()
        return Mock()

    meter = Meter(Links(world_size, per_node, is_ring=True))
    return DeviceCollectives(library(rank, world_size), Mock(launch=launch), meter)


@pytest.mark.parametrize("per_node", [None, 8], ids=["one-node", "nodes-of-8"])
def test_a_reduction_takes_as_many_operators_at_any_size_and_moves_three_bytes_an_element(per_node):
    found, numel = [], 4096
    for size in (16, 64, 512):
        device = _device(1, size, per_node or size)
        full, out = torch.ones(size * numel, dtype=torch.bfloat16), torch.empty(numel)
        device.reduce_scatter(out, full, unit=0).wait()  # allocates scratch buffers
        with _Counter() as counter:
            work = device.reduce_scatter(out, full, unit=0)
            work.wait()
            assert work.norm.shape == ()
            assert work.nonfinite.shape == (size,)
        found.append(counter.operators)
        assert per_node or counter.num_bytes <= 3 * size * numel
    assert found[0] == found[1] == found[2]
    assert len(found[0]) <= (4 if per_node else 2), found[0]


def test_a_gather_leaves_the_own_shard_to_the_library():
    out, shard = torch.empty(8 * 64), torch.ones(64)
    with _Counter() as counter:
        _device(1, 8, 8).all_gather(out, shard, unit=0, version=0, backward=False).wait()
    assert counter.operators == []
