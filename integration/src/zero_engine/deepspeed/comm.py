"""``deepspeed.comm``: torch.distributed, with DeepSpeed's names of functions and parameters.

``prof``, ``log_name`` and ``debug`` belong to DeepSpeed's communication log and have no effect.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import inspect
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup as ProcessGroup
from torch.distributed import ReduceOp as ReduceOp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zero_core import ConfigError
from zero_engine.deepspeed.accelerator import get_accelerator as get_accelerator
from zero_engine.launch.started_ranks import device_index, end_with_launcher, rank_variables
from zero_engine.monitoring import log_summary as log_summary

LOG_ARGUMENTS = ("prof", "log_name", "debug")
_ALIKE = """
    all_gather all_gather_object all_reduce all_to_all barrier batch_isend_irecv broadcast
    broadcast_object_list destroy_process_group gather get_rank get_world_size irecv is_available
    is_initialized isend monitored_barrier new_group recv reduce reduce_scatter scatter send
"""
"""Functions whose parameters have the same names in torch and in DeepSpeed."""


def _as_torch(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """Wrap torch's ``function``. ``names`` are DeepSpeed's names of its first parameters."""
    renamed = dict(zip(names, inspect.signature(function).parameters, strict=False))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        passed = {
            renamed.get(name, name): value
            for name, value in kwargs.items()
            if name not in LOG_ARGUMENTS
        }
        return function(*args, **passed)

    return call


# foreign: torch 2.13 renames all_gather_into_tensor, and later releases warn of the old name.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# foreign: torch 2.13 renames reduce_scatter_tensor, too.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

for _name in _ALIKE.split():
    globals()[_name] = _as_torch(getattr(dist, _name))
inference_all_reduce = _as_torch(dist.all_reduce)
all_gather_into_tensor = _as_torch(_all_gather_single, "output_tensor", "tensor")
all_to_all_single = _as_torch(dist.all_to_all_single, "output", "tensor")
allgather_fn = _as_torch(_all_gather_single, "output_tensor", "input_tensor")
reduce_scatter_fn = reduce_scatter_tensor = _as_torch(
    _reduce_scatter_single, "output_tensor", "tensor"
)


def get_all_ranks_from_group(group: ProcessGroup | None = None) -> list[int]:
    return dist.get_process_group_ranks(group)


def get_local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> Any:
    return dist.group.WORLD


def get_global_rank(group: ProcessGroup | None = None, group_rank: int = 0) -> int:
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def initialize_mesh_device(
    mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]
) -> DeviceMesh:
    """Return a mesh of all ranks. Every rank must call it."""
    device_type = get_accelerator().device_type
    return init_device_mesh(device_type, mesh_shape, mesh_dim_names=mesh_dim_names)


def all_reduce_coalesced(
    tensors: list[Tensor],
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    works = [dist.all_reduce(tensor, op, group, async_op) for tensor in tensors]
    return _Works(works) if async_op else None


def all_gather_coalesced(
    output_tensors: list[Tensor],
    input_tensors: list[Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    pairs = zip(output_tensors, input_tensors, strict=True)
    works = [_all_gather_single(whole, part, group, async_op) for whole, part in pairs]
    return _Works(works) if async_op else None


def has_all_gather_into_tensor() -> bool:
    return True


has_reduce_scatter_tensor = has_all_reduce_coalesced = has_all_gather_into_tensor


def has_coalescing_manager() -> bool:
    """Return False: ``all_reduce_coalesced`` and ``all_gather_coalesced`` loop over tensors."""
    return False


class _Works:
    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


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
