"""The process group of the ranks, as the launcher's environment describes it."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zero_engine.started_ranks import rank_variables

__all__ = ["init_distributed"]


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
    """Start torch.distributed, if it isn't yet; without a launcher, as one rank alone.

    Args:
        auto_mpi_discovery: take ranks from the variables of mpirun and srun, where RANK isn't set.
        distributed_port: where rank 0 listens, if MASTER_PORT isn't set.

    Raises:
        ConfigError: srun or mpirun started several ranks, and rank 0's address isn't known.
    """
    if dist.is_initialized() or dist_init_required is False:
        return
    if auto_mpi_discovery and rank < 0:
        os.environ.update(rank_variables(os.environ, port=distributed_port))
    backend = dist_backend or default_backend()
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if "RANK" not in os.environ and rank < 0:
        store = torch._C._distributed_c10d.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, **options)
        return
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    dist.init_process_group(
        backend, init_method=init_method, rank=rank, world_size=world_size, **options
    )


def default_backend() -> str:
    """The backend of the accelerator that is there; gloo on the CPU."""
    if not torch.accelerator.is_available():
        return "gloo"
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return dist.get_default_backend_for_device(device)
