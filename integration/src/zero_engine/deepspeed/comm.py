"""``deepspeed.comm``: torch.distributed under DeepSpeed's names and parameters.

``prof``, ``log_name`` and ``debug`` belong to DeepSpeed's communication log and have no effect.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup as ProcessGroup
from torch.distributed import ReduceOp as ReduceOp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zero_engine.deepspeed.accelerator import get_accelerator as get_accelerator
from zero_engine.deepspeed.distributed import init_distributed as init_distributed
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
