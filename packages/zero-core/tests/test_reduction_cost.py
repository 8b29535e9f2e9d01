"""The cost of a reduction on an accelerator: operators and bytes, at any number of ranks."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero_core.comm.device import DeviceCollectives
from zero_core.comm.meter import Links

NUMEL = 4096  # of a slice


class _Done:
    def wait(self):
        """Return at once."""


class _Inline:
    """`CommQueues` that run jobs at once in the caller's thread, seen by its dispatch mode."""

    def launch(self, job, *, is_reduction):
        job()
        return _Done()


class _Library:
    """A `DeviceLibrary` of one rank that stands for many and leaves buffers as they are."""

    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size

    def all_gather(self, out, shard):
        assert out.numel() == self.world_size * shard.numel()
        return _Done()

    def all_to_all(self, out, parts):
        assert out.numel() == parts.numel()
        return _Done()

    def subgroup(self, ranks, lane):
        return _Library(list(ranks).index(self.rank), len(ranks))


class _Counter(TorchDispatchMode):
    """A dispatch mode that counts operators that move data, and the bytes they read and write."""

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


def _device(world_size, per_node):
    links = Links(world_size, per_node, is_ring=True)
    library = _Library(1, world_size)
    return DeviceCollectives(library, links=links, queues=_Inline())


def _reduce(world_size, per_node, dtype):
    """Count a reduction and everything that the engine reads of it."""
    device = _device(world_size, per_node)
    full, out = torch.ones(world_size * NUMEL, dtype=dtype), torch.empty(NUMEL)
    device.reduce_scatter(out, full, unit=0).wait()  # its scratch is there
    with _Counter() as counter:
        work = device.reduce_scatter(out, full, unit=0)
        work.wait()
        assert work.norm.shape == ()
        assert work.nonfinite.shape == (world_size,)
    return counter


@pytest.mark.parametrize("is_on_nodes", [False, True], ids=["one-node", "nodes-of-8"])
def test_a_reduction_takes_as_many_operators_at_any_size_and_moves_three_bytes_an_element(
    is_on_nodes,
):
    sizes = (16, 64, 512)
    counters = [_reduce(size, 8 if is_on_nodes else size, torch.bfloat16) for size in sizes]
    first, *others = (counter.operators for counter in counters)
    assert all(names == first for names in others)
    assert len(first) <= (4 if is_on_nodes else 2), first
    if not is_on_nodes:
        for size, counter in zip(sizes, counters, strict=True):
            assert counter.num_bytes <= 3 * size * NUMEL


def test_a_gather_leaves_the_own_shard_to_the_library():
    device = _device(8, 8)
    with _Counter() as counter:
        out, shard = torch.empty(8 * NUMEL), torch.ones(NUMEL)
        counter.operators.clear()
        device.all_gather(out, shard, unit=0, version=0, backward=False).wait()
    assert counter.operators == []
