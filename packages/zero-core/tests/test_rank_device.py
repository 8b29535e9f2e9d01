"""The device of a rank: found without ``set_device``, and refused where two ranks share one."""

from __future__ import annotations

import dataclasses
import os
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zero_core import ConfigError
from zero_core.comm.topology import Ranks, check_devices, find_ranks
from zero_core.testing import late_device, run_alone, simulate


def _found(**environment: str) -> str:
    os.environ.pop("LOCAL_RANK", None)
    os.environ.update(environment)
    device = find_ranks(None, None).device
    assert torch.accelerator.current_device_index() == device.index
    return str(device)


def _choices() -> None:
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


def test_a_rank_takes_the_bound_device_then_the_current_one_then_its_local_rank() -> None:
    run_alone(_choices)


class _OwnDevices(Ranks):
    has_own_device = True  # as on NCCL


def _check(ranks: Ranks, devices: list[str]) -> None:
    fields = {f.name: getattr(ranks, f.name) for f in dataclasses.fields(Ranks)}
    fields["device"] = torch.device(devices[ranks.rank])
    check_devices(ranks.connect(), _OwnDevices(**fields))


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 on host 0, ranks 2 and 3 on host 1."""

    def name() -> str:
        rank = int(threading.current_thread().name.rsplit(maxsplit=1)[-1])
        return f"host{rank // 2}"

    monkeypatch.setattr(socket, "gethostname", name)


def test_equal_numbers_on_two_hosts_are_different_devices(two_hosts: Any) -> None:
    simulate(_check, 4, ["xpu:0", "xpu:1", "xpu:0", "xpu:1"])


def test_ranks_that_share_a_device_are_refused_by_name(two_hosts: Any) -> None:
    found = r"found ranks \[2, 3\] on xpu:0 of host1\. Start the ranks by torchrun"
    with pytest.raises(ConfigError, match=found):
        simulate(_check, 4, ["xpu:0", "xpu:1", "xpu:0", "xpu:0"])
