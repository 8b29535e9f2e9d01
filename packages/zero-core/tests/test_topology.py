"""The ranks' nodes, found from a mesh, the launcher or host names, and the ranks' devices."""

import os
import socket
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import fake_cuda
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zero_core
from zero_core import ConfigError
from zero_core.comm.groups import Ranks
from zero_core.comm.topology import LOCAL_RANKS, check_devices, count_per_node, find_ranks, fold
from zero_core.testing import Case, alone, on_processes, spawn


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("a", 1),
        ("aaaa", 4),
        ("aabb", 2),
        ("abcd", 1),
        ("aaabbbcccddd", 3),
        ("aaaabb", 2),  # unequal nodes: the first node is split into two groups
        ("aaab", 1),
        ("aaaaaabbbbcc", 2),
        ("abab", 1),  # ranks of a node are not consecutive
        ("aabbaa", 1),
    ],
)
def test_nodes_are_folded_into_equal_groups_of_consecutive_ranks(nodes, expected, caplog):
    assert fold(nodes) == expected
    assert not caplog.records
    assert fold(nodes, is_told=True) == expected
    given_up = {"aaaabb": "nodes have 4, 2 ranks: they count as nodes of 2", "abab": "not consec"}
    assert given_up.get(nodes, "") in caplog.text
    is_even = len({nodes.count(node) for node in nodes}) == 1 and nodes == "".join(sorted(nodes))
    assert len(caplog.records) == (not is_even)


def _count(environment):
    for name in [
        n for n in os.environ if n.startswith(("LOCAL_", "GROUP_", "RANK", "SLURM_", "OMPI_"))
    ]:
        del os.environ[name]
    os.environ.update(environment)
    ranks = find_ranks(None, None)
    return count_per_node(ranks.connect(), ranks)


@on_processes(4)
def test_each_launcher_tells_its_nodes(ranks):
    rank, half = ranks.rank, str(ranks.rank // 2)
    assert _count({}) == 4
    assert _count({"LOCAL_WORLD_SIZE": "4"}) == 4
    assert _count({"LOCAL_WORLD_SIZE": "2"}) == 2
    assert _count({"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": half, "RANK": str(rank)}) == 2
    assert _count({"LOCAL_WORLD_SIZE": "1"}) == 1
    # If torchrun's nodes have unequal sizes, only the node's number identifies a node.
    sizes = "3" if rank < 3 else "1"
    assert _count({"LOCAL_WORLD_SIZE": sizes, "GROUP_RANK": str(rank // 3)}) == 1
    # ranks of a node are not consecutive
    assert _count({"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": str(rank % 2)}) == 1
    assert _count({"SLURM_NODEID": half}) == 2
    # Open MPI numbers no nodes, so a round-robin placement cannot be excluded. Host names decide.
    assert _count({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_RANK": str(rank)}) == 4
    # In a SLURM allocation, torchrun's variables win, because torchrun is the innermost launcher.
    assert _count({"LOCAL_WORLD_SIZE": "2", "SLURM_NODEID": "0"}) == 2
    # If ranks have different variables, they compare host names.
    assert _count({"SLURM_NODEID": "0"} if rank else {}) == 4


def _build(**keywords):
    torch.manual_seed(0)
    return zero_core.build(nn.Linear(5, 3), Case(3).config(), **keywords)


def _sent(engine):
    engine.backward(engine(torch.ones(1, 5)).sum())
    engine.step()
    (row,) = [t for t in engine.comm_report() if t.collective == "all_gather"]
    return row.within_node_bytes, row.between_nodes_bytes


@on_processes(4)
def test_a_mesh_tells_the_ranks_and_the_nodes(ranks):
    engine = _build()
    (segment,) = engine.layout.segments
    shard = 4 * segment.shard_numel
    assert _sent(engine) == (3 * shard, 0)
    flat = init_device_mesh("cpu", (4,))
    assert _sent(_build(mesh=flat)) == (3 * shard, 0)
    nodes = init_device_mesh("cpu", (2, 2))
    assert _sent(_build(mesh=nodes)) == (2 * shard, shard)
    assert _sent(_build(mesh=init_device_mesh("cpu", (4, 1)))) == (0, 3 * shard)
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    assert _sent(_build(mesh=nodes)) == (2 * shard, shard)
    assert _sent(_build(mesh=flat)) == (3 * shard, 0)
    part = _build(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"])
    assert (part.world_size, part.rank) == (2, ranks.rank % 2)
    deep = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    part = _build(mesh=deep["b", "c"])
    assert (part.world_size, part.rank) == (2, ranks.rank % 2)
    assert _sent(part) == (0, 4 * part.layout.segments[0].shard_numel)
    with pytest.raises(ConfigError, match=r"process_group or mesh, found both"):
        _build(mesh=flat, process_group=dist.group.WORLD)
    with pytest.raises(ConfigError, match=r"one dimension \(ranks\) or two"):
        _build(mesh=init_device_mesh("cpu", (2, 2, 1)))
    with pytest.raises(ConfigError, match="ascending ranks"):
        _build(mesh=DeviceMesh("cpu", torch.tensor([[2, 3], [0, 1]])))


def _found(**environment):
    for variable in LOCAL_RANKS:
        os.environ.pop(variable, None)
    os.environ.update(environment)
    device = find_ranks(None, None).device
    assert torch.accelerator.current_device_index() == device.index
    return str(device)


@pytest.mark.cuda
@alone
def test_a_rank_takes_the_bound_device_then_the_current_one_then_its_local_rank():
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group("cpu:gloo,cuda:gloo", store=store, rank=0, world_size=1)
    assert _found() == "cuda:0"
    assert _found(LOCAL_RANK="2") == "cuda:2"
    assert _found(LOCAL_RANK="3") == "cuda:2"  # the device that is already current wins
    # A launcher may run within those listed after it in `LOCAL_RANKS`, so its variable wins.
    given = {}
    for variable, number in zip(reversed(LOCAL_RANKS), "14567", strict=True):
        torch.accelerator.set_device_index(0)
        given[variable] = number
        assert _found(**given) == f"cuda:{number}"
    torch.accelerator.set_device_index(0)
    assert _found(LOCAL_RANK="8") == "cuda:0"  # each rank may see only its own device
    world = dist.group.WORLD
    assert world is not None
    world.bound_device_id = torch.device("cuda", 1)
    assert _found(LOCAL_RANK="3") == "cuda:1"
    assert 3 not in fake_cuda.contexts()
    dist.destroy_process_group()


def _devices(rank, world_size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: f"host{rank // 2}")
        group = dist.new_group([0, 2, 3])
        for _ in range(2):
            check_devices(Ranks(None, rank, world_size, torch.device("xpu", rank)))
            if rank != 1:
                position = [0, 2, 3].index(rank)
                check_devices(Ranks(group, position, 3, torch.device("xpu", rank)))
        check_devices(Ranks(None, rank, world_size, torch.device("xpu", rank % 2)))
        found = r"found ranks \[2, 3\] on xpu:0 of host1\. Start the ranks by torchrun"
        with pytest.raises(ConfigError, match=found):
            check_devices(Ranks(None, rank, world_size, torch.device("xpu", rank % 2 * (rank < 2))))


def test_ranks_that_share_a_device_are_refused_by_name():
    spawn(_devices, 4, backend="cpu:gloo")
