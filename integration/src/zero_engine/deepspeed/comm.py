"""Stands for ``deepspeed.comm``: torch.distributed under the names and parameters of DeepSpeed.

``prof``, ``log_name`` and ``debug`` name a call in DeepSpeed's log of communication; they change
nothing about the call.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zero_comm.transport.torch_compat import all_gather_single, reduce_scatter_single
from zero_engine.deepspeed.accelerator.real_accelerator import get_accelerator
from zero_engine.deepspeed.distributed import init_distributed
from zero_engine.monitoring.communication import log_summary

__all__ = [
    "ProcessGroup",
    "ReduceOp",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "get_all_ranks_from_group",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_reduce_scatter_tensor",
    "inference_all_reduce",
    "init_distributed",
    "initialize_mesh_device",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "log_summary",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]

LOG_ARGUMENTS = ("prof", "log_name", "debug")

destroy_process_group = dist.destroy_process_group
get_rank = dist.get_rank
get_world_size = dist.get_world_size
is_available = dist.is_available
is_initialized = dist.is_initialized
new_group = dist.new_group


def _as_torch(function: Callable[..., Any], **renamed: str) -> Callable[..., Any]:
    """torch's ``function`` with DeepSpeed's names of parameters: ``renamed`` maps them to torch's.

    The parameters stand in the same order in both.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        passed = {
            renamed.get(name, name): value
            for name, value in kwargs.items()
            if name not in LOG_ARGUMENTS
        }
        return function(*args, **passed)

    return call


all_gather = _as_torch(dist.all_gather)
all_gather_object = _as_torch(dist.all_gather_object)
all_reduce = _as_torch(dist.all_reduce)
all_to_all = _as_torch(dist.all_to_all)
all_to_all_single = _as_torch(dist.all_to_all_single, tensor="input")
barrier = _as_torch(dist.barrier)
batch_isend_irecv = _as_torch(dist.batch_isend_irecv)
broadcast = _as_torch(dist.broadcast)
broadcast_object_list = _as_torch(dist.broadcast_object_list)
gather = _as_torch(dist.gather)
inference_all_reduce = all_reduce
irecv = _as_torch(dist.irecv)
isend = _as_torch(dist.isend)
monitored_barrier = _as_torch(dist.monitored_barrier)
recv = _as_torch(dist.recv)
reduce = _as_torch(dist.reduce)
reduce_scatter = _as_torch(dist.reduce_scatter)
scatter = _as_torch(dist.scatter)
send = _as_torch(dist.send)


def all_gather_into_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather_into_tensor",
    debug: str | None = None,
) -> Any:
    """Gather every rank's ``tensor`` into ``output_tensor``, in rank order, on every rank."""
    return all_gather_single(output_tensor, tensor, group, async_op=async_op)


def allgather_fn(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    debug: str | None = None,
) -> Any:
    """Gather as `all_gather_into_tensor`."""
    return all_gather_single(output_tensor, input_tensor, group, async_op=async_op)


def reduce_scatter_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter_tensor",
    debug: str | None = None,
) -> Any:
    """Reduce all ranks' ``tensor`` and write this rank's part into ``output_tensor``."""
    return reduce_scatter_single(output_tensor, tensor, op, group, async_op=async_op)


reduce_scatter_fn = reduce_scatter_tensor


def get_local_rank() -> int:
    """Return this rank's number on its machine, as the launcher gave it."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> Any:
    """Return the group of all ranks."""
    return dist.group.WORLD


def get_global_rank(group: ProcessGroup | None = None, group_rank: int = 0) -> int:
    """Return the global rank of rank ``group_rank`` of ``group``."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: ProcessGroup | None = None) -> list[int]:
    """Return the global ranks of ``group``."""
    return dist.get_process_group_ranks(group)


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
    """Reduce each of ``tensors`` over the ranks, in place."""
    works = [dist.all_reduce(tensor, op, group, async_op) for tensor in tensors]
    return _Works(works) if async_op else None


def all_gather_coalesced(
    output_tensors: list[Tensor],
    input_tensors: list[Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Gather each of ``input_tensors`` into its output, world size times as large."""
    works = [
        all_gather_single(whole, part, group, async_op=async_op)
        for whole, part in zip(output_tensors, input_tensors, strict=True)
    ]
    return _Works(works) if async_op else None


def has_all_gather_into_tensor() -> bool:
    """Whether torch has it: True."""
    return True


has_reduce_scatter_tensor = has_all_reduce_coalesced = has_all_gather_into_tensor


def has_coalescing_manager() -> bool:
    """Whether coalesced calls are sent as one: False, they are one call per tensor."""
    return False


class _Works:
    """Several collectives that are waited for together."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)
