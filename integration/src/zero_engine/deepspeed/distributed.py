"""Start of torch.distributed from the variables of the launcher."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zero_core import ConfigError
from zero_engine.launch.started_ranks import device_index, end_with_launcher, rank_variables


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start torch.distributed if necessary. Without a launcher there is one rank.

    It also calls `choose_device` and `end_with_launcher`.

    Args:
        timeout: timeout of collectives. Default: DEEPSPEED_TIMEOUT, in minutes, or torch's.
        auto_mpi_discovery: read ranks from the variables of mpirun and srun if neither RANK nor
            ``rank`` is set.
        distributed_port: port of rank 0 if MASTER_PORT is not set. Under srun the default is
            replaced by a port that depends on the job.

    Raises ConfigError if srun or mpirun started several ranks and rank 0's address is unknown, or
    DEEPSPEED_TIMEOUT is no number of minutes.
    """
    is_started = dist.is_initialized() or dist_init_required is False
    if auto_mpi_discovery and rank < 0 and not is_started:
        os.environ.update(rank_variables(os.environ, port=distributed_port))
    choose_device()
    end_with_launcher()
    if is_started:
        return
    backend = dist_backend or "gloo"
    if not dist_backend and torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        assert device is not None
        backend = dist.get_default_backend_for_device(device)
    if "gloo" in backend:
        # The first torch optimizer imports torch._dynamo. If a group exists at that time, the
        # import keeps the group alive past the destroy_process_group in `_leave` (torch 2.13).
        importlib.import_module("torch._dynamo")
    options: dict[str, Any] = {"timeout": timeout} if timeout else {}
    minutes = os.environ.get("DEEPSPEED_TIMEOUT")
    if not timeout and minutes is not None:
        if not minutes.isdecimal() or int(minutes) < 1:
            raise ConfigError(f"DEEPSPEED_TIMEOUT = {minutes!r}: expected minutes, 1 or more")
        options = {"timeout": timedelta(minutes=int(minutes))}
    atexit.register(_leave)
    if "RANK" not in os.environ and rank < 0:
        store = torch._C._distributed_c10d.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, **options)
        return
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    dist.init_process_group(
        backend, init_method=init_method, rank=rank, world_size=world_size, **options
    )


def choose_device(index: int | None = None) -> None:
    """Make accelerator ``index`` the current one, by default that of LOCAL_RANK, if it is set."""
    if not torch.accelerator.is_available():
        return
    if index is None:
        index = device_index(os.environ, num_visible=torch.accelerator.device_count())
    if index is not None and index >= 0:
        torch.accelerator.set_device_index(index)


def _leave() -> None:
    """Destroy a gloo group at exit, because its threads may abort the process (torch 2.13).

    An NCCL group is not destroyed, because that could wait for a rank that has died.
    """
    if dist.is_initialized() and dist.get_backend() == "gloo":
        gc.collect()  # an engine in a reference cycle holds the group
        dist.destroy_process_group()
