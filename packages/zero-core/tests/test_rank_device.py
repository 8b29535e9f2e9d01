"""The device of a rank: found without ``set_device``, and refused where two ranks share one."""

import os
import socket
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from zero_core import ConfigError
from zero_core.comm.topology import Ranks, check_devices, find_ranks
from zero_core.testing import late_device, run_alone, spawn


def _found(**environment):
    os.environ.pop("LOCAL_RANK", None)
    os.environ.update(environment)
    device = find_ranks(None, None).device
    assert torch.accelerator.current_device_index() == device.index
    return str(device)


def _choices():
    late_device.load(4)
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group("cpu:gloo,late:gloo", store=store, rank=0, world_size=1)
    assert _found() == "late:0"
    assert _found(LOCAL_RANK="2") == "late:2"  # torchrun, and nothing else was said
    assert _found(LOCAL_RANK="3") == "late:2"  # the program chose one
    torch.accelerator.set_device_index(0)
    assert _found(LOCAL_RANK="7") == "late:0"  # as with CUDA_VISIBLE_DEVICES for each rank
    world = dist.group.WORLD
    assert world is not None
    world.bound_device_id = torch.device("late", 1)
    assert _found(LOCAL_RANK="3") == "late:1"
    assert 3 not in late_device.contexts()
    dist.destroy_process_group()


def test_a_rank_takes_the_bound_device_then_the_current_one_then_its_local_rank():
    run_alone(_choices)


def _check(rank, world_size):
    """Compare devices of ranks, of which two are on a host.

    The group has no backend on them: none of its collectives would run, as on NCCL if ranks share a
    device.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: f"host{rank // 2}")
        group = dist.new_group([0, 2, 3])
        for _ in range(2):
            check_devices(Ranks(None, rank, world_size, torch.device("xpu", rank)))
            if rank != 1:
                position = [0, 2, 3].index(rank)
                check_devices(Ranks(group, position, 3, torch.device("xpu", rank)))
        # Equal numbers on two hosts are different devices.
        check_devices(Ranks(None, rank, world_size, torch.device("xpu", rank % 2)))
        found = r"found ranks \[2, 3\] on xpu:0 of host1\. Start the ranks by torchrun"
        with pytest.raises(ConfigError, match=found):
            check_devices(Ranks(None, rank, world_size, torch.device("xpu", rank % 2 * (rank < 2))))


def test_ranks_that_share_a_device_are_refused_by_name():
    spawn(_check, 4, backend="cpu:gloo")
