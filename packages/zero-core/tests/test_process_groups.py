"""Process groups of engines: created without a hang, shared, and destroyed with their last user."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import zero_core
from zero_core import ConfigError
from zero_core._torch import count_groups, timeout_of
from zero_core.comm import groups
from zero_core.comm.communicator import Communicator
from zero_core.comm.control import Lane
from zero_core.comm.device import DeviceCollectives
from zero_core.comm.groups import ProcessLibrary, Ranks
from zero_core.comm.meter import Links, Meter
from zero_core.comm.queues import HostQueues
from zero_core.testing import Case, spawn

CPU = torch.device("cpu")
CONFIG = Case(3).config()


def _connect(group: dist.ProcessGroup | None) -> DeviceCollectives:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    library = ProcessLibrary(Ranks(group, rank, size, CPU))
    return DeviceCollectives(library, HostQueues(), Meter(Links(size, size, is_ring=True)))


def _check(collectives: Any) -> None:
    rank, size = collectives.rank, collectives.world_size
    out = torch.empty(size)
    shard = torch.full((1,), float(rank))
    collectives.all_gather(out, shard, unit=0, version=0, backward=False).wait()
    assert out.tolist() == list(range(size))
    total = torch.empty(1)
    collectives.reduce_scatter(total, torch.arange(float(size)), unit=0).wait()
    assert total.item() == rank * size


def _groups_of_its_own(rank: int, ranks: list[int], num: int) -> list[Any]:
    """Create groups on ``ranks`` only, so that the ranks' counters of groups differ."""
    if rank not in ranks:
        return []
    return [dist.new_group(ranks, use_local_synchronization=True) for _ in range(num)]


def _all_ranks_with_different_numbers_of_groups_build(rank: int, world_size: int) -> None:
    kept = _groups_of_its_own(rank, [1], 2)
    assert count_groups() == 1 + len(kept)
    collectives = _connect(None)
    _check(collectives)
    pairs = [[0, 2], [1]]
    _check(collectives.subgroup(next(p for p in pairs if rank in p)))


def _some_ranks_with_different_numbers_of_groups_build(rank: int, world_size: int) -> None:
    group = dist.new_group([0, 2])
    kept = _groups_of_its_own(rank, [2], 2)
    if rank != 1:
        num_groups = count_groups()
        for _ in range(3):  # a reused group name would find stale keys of the previous group
            collectives = _connect(group)
            _check(collectives)
            _check(collectives.subgroup([collectives.rank]))
            assert count_groups() == num_groups + 4
            collectives.close()
            assert count_groups() == num_groups
        assert _build(process_group=group).world_size == 2
    del kept
    dist.barrier()


def _build(**keywords: Any) -> zero_core.Engine:
    torch.manual_seed(0)
    return zero_core.build(nn.Linear(5, 3), CONFIG, **keywords)


def _meshes_over_some_ranks_build(rank: int, world_size: int) -> None:
    mesh = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 4]]))
    other = DeviceMesh("cpu", torch.tensor([[0, 1], [3, 4]]))
    if rank in (0, 1, 2, 4):
        engine = _build(mesh=mesh)
        assert engine.world_size == 4
        num_groups = count_groups()
        assert _build(mesh=mesh).world_size == 4
        assert count_groups() == num_groups
    if rank in (0, 1, 3, 4):  # ranks 2 and 3 are in one mesh each, ranks 0, 1 and 4 in both
        assert _build(mesh=other).world_size == 4
    dist.barrier(dist.new_group())  # hangs if the ranks' counters of default group names differ


def _groups_are_shared_and_end_with_the_last_engine(rank: int, world_size: int) -> None:
    num_groups = count_groups()
    for _ in range(2):
        first, second = _connect(None), _connect(None)
        assert count_groups() == num_groups + 2
        for _ in range(2):  # two plug-ins may split the ranks in the same way
            _check(first.subgroup([0, 1] if rank < 2 else [2]))
        assert count_groups() == num_groups + 4
        descriptions = {g.group_desc for g in dist.distributed_c10d._world.pg_names}
        assert {"zero_core gathers", "zero_core reductions"} <= descriptions
        first.close()
        _check(second)
        assert count_groups() == num_groups + 2
        second.close()
        assert count_groups() == num_groups
    # Only rank 1 closes its collectives. New collectives still work on all ranks.
    kept = _connect(None)
    if rank == 1:
        kept.close()
    again = _connect(None)
    _check(again)
    again.close()


def _connect_on(ranks: Ranks, *others: Any, **named: Any) -> DeviceCollectives:
    return _connect(ranks.group)


def _an_engines_groups_end_with_it_and_where_its_build_or_its_watch_fails(
    rank: int, world_size: int
) -> None:
    build: Any = import_module("zero_core.building")
    build.make_transport = _connect_on
    num_groups = count_groups()
    for end in ("close", "unwrap", "close"):
        engine, second = _build(), _build()
        assert count_groups() == num_groups + 2
        second.close()
        engine.backward(engine(torch.ones(1, 5)).square().sum())
        engine.step()
        getattr(engine, end)()
        dist.barrier()
        assert count_groups() == num_groups

    def no_tier(**own: Any) -> Any:
        raise KeyboardInterrupt("while the state is allocated")

    with pytest.raises(KeyboardInterrupt, match="while the state"):
        _build(state_tier=no_tier)
    assert count_groups() == num_groups

    def fails(communicator: Communicator) -> None:
        raise RuntimeError("the device has failed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "close", fails)
        engine = _build()
        with pytest.raises(RuntimeError, match="the device has failed"):
            engine.close()
    assert count_groups() == num_groups


def _the_groups_of_an_engine_that_is_dropped_end_later(rank: int, world_size: int) -> None:
    num_groups = count_groups()
    dropped = _connect(None)
    if rank == 1:
        del dropped  # as if garbage collection ran on rank 1 only
    again = _connect(None)
    _check(again)
    assert count_groups() == num_groups + (4 if rank != 1 else 2)
    if rank != 1:
        del dropped
    assert count_groups() == num_groups + (4 if rank != 1 else 2)
    again.close()
    assert count_groups() == num_groups


def _groups_that_end_together_are_aborted_as_one(rank: int, world_size: int) -> None:
    """Check that aborts are between group start and end. gloo's class stands in for NCCL's."""
    calls: list[str] = []
    gloo: Any = dist.ProcessGroupGloo
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_nccl_available", lambda: True)
        patch.setattr(dist, "ProcessGroupNCCL", gloo, raising=False)
        patch.setattr(gloo, "_group_start", lambda self: calls.append("start"), raising=False)
        patch.setattr(gloo, "_group_end", lambda self: calls.append("end"), raising=False)
        abort = dist.ProcessGroup.abort

        def noted(group: dist.ProcessGroup) -> None:
            calls.append(group.group_desc)
            abort(group)

        patch.setattr(dist.ProcessGroup, "abort", noted)
        _connect(None).close()
    assert calls == ["start", "zero_core gathers", "zero_core reductions", "end"]


def _some_ranks_with_a_bound_device_split_their_group(rank: int, world_size: int) -> None:
    """Check the calls of ``split_group`` for a bound device, with a fake because it needs NCCL."""
    group = dist.new_group([0, 2])
    kept = _groups_of_its_own(rank, [2], 2)
    world = dist.group.WORLD
    assert world is not None
    if rank == 1:
        return
    calls: list[tuple[Any, ...]] = []

    def split(parent: Any, parts: Any, **options: Any) -> Any:
        calls.append((parent, parts, options["group_desc"]))
        world.bound_device_id = None
        ranks = next(ranks for part in parts if rank in (ranks := [2 * r for r in part]))
        made = dist.new_group(ranks, use_local_synchronization=True)
        world.bound_device_id = torch.device("cuda", 0)
        return made

    dist.split_group = split
    world.bound_device_id = torch.device("cuda", 0)
    collectives = _connect(group)
    _check(collectives)
    _check(collectives.subgroup([collectives.rank]))
    lanes = [f"zero_core {lane.value}" for lane in Lane]
    expected = [(group, [[0, 1]], lane) for lane in lanes]
    assert calls == expected + [(group, [[0], [1]], lane) for lane in lanes]
    with pytest.raises(ConfigError, match=r"\[\[1, 0\]\]: expected ascending ranks"):
        collectives.subgroup([1, 0])
    mesh: Any = SimpleNamespace(mesh=torch.tensor([[0], [2]]))
    with pytest.raises(ConfigError, match=r"new_group\(\[0, 2\]\)"):
        groups.group_of_mesh(mesh, CPU)
    world.bound_device_id = None
    del kept


def _subgroups_that_overlap_are_refused_by_name(rank: int, world_size: int) -> None:
    with pytest.raises(ConfigError, match=r"rank 1: gathers of \[0, 1\]; rank 2: gathers of \[1"):
        _connect(None).subgroup([[0, 1], [0, 1], [1, 2]][rank])


class _PluginGroup(dist.ProcessGroup):
    pass


def _a_backend_without_options_has_the_default_timeout(rank: int, world_size: int) -> None:
    def make(store: Any, rank: int, size: int, timeout: Any) -> dist.ProcessGroup:
        return _PluginGroup(rank, size)

    dist.Backend.register_backend("plugin", make, devices=["cpu"])
    assert timeout_of(dist.new_group(timeout=timedelta(minutes=2)), CPU) == timedelta(minutes=2)
    group = dist.new_group([0], backend="plugin", timeout=timedelta(minutes=1))
    assert timeout_of(group, CPU) == timedelta(minutes=30)


@pytest.mark.parametrize(
    ("what", "world_size"),
    [
        (_all_ranks_with_different_numbers_of_groups_build, 3),
        (_some_ranks_with_different_numbers_of_groups_build, 3),
        (_meshes_over_some_ranks_build, 5),
        (_groups_are_shared_and_end_with_the_last_engine, 3),
        (_an_engines_groups_end_with_it_and_where_its_build_or_its_watch_fails, 1),
        (_an_engines_groups_end_with_it_and_where_its_build_or_its_watch_fails, 2),
        (_the_groups_of_an_engine_that_is_dropped_end_later, 3),
        (_groups_that_end_together_are_aborted_as_one, 2),
        (_some_ranks_with_a_bound_device_split_their_group, 3),
        (_subgroups_that_overlap_are_refused_by_name, 3),
        (_a_backend_without_options_has_the_default_timeout, 1),
    ],
    ids=lambda given: getattr(given, "__name__", str(given)).strip("_"),
)
def test_process_groups_of_engines(what: Callable[[int, int], None], world_size: int) -> None:
    spawn(what, world_size)


def _a_limited_engine_trains_where_warnings_are_errors(rank: int, world_size: int) -> None:
    warnings.simplefilter("error")
    torch.accelerator.set_device_index(rank)
    engine = Case(3, top={"collective_timeout_s": 60.0}).build(model=nn.Linear(5, 3))
    engine.backward(engine(torch.ones(1, 5, device=engine.device)).sum())
    engine.step()
    engine.close()


@pytest.mark.cuda
def test_groups_of_nccl_with_a_timeout_are_made_without_a_warning() -> None:
    spawn(_a_limited_engine_trains_where_warnings_are_errors, 2, backend="nccl")
