"""``deepspeed.utils.groups``: all ranks are data-parallel, and other groups have one rank each."""

from __future__ import annotations

import torch.distributed as dist


def get_data_parallel_group() -> dist.ProcessGroup | None:
    """Return the group of all ranks, None before torch.distributed is initialised."""
    return dist.group.WORLD if dist.is_initialized() else None


def get_data_parallel_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def get_data_parallel_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def get_model_parallel_world_size() -> int:
    """Return 1: no layer is split."""
    return 1


def get_model_parallel_rank() -> int:
    return 0


get_tensor_model_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = get_model_parallel_rank
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = get_data_parallel_rank
_get_model_parallel_world_size = get_model_parallel_world_size
_get_sequence_parallel_world_size = get_model_parallel_world_size
_get_sequence_parallel_rank = get_model_parallel_rank


def _get_sequence_parallel_group() -> None:
    pass


def secondary_group(num_ranks: object) -> dist.ProcessGroup | None:
    """Return the group of ``num_ranks`` neighbours that this rank is in, None of less than two.

    hpZ's ``zero_hpz_partition_size``, which is None for "node" too. Every rank must call it. The
    engine's own secondary shards do without a process group.
    """
    if not isinstance(num_ranks, int) or num_ranks < 2 or not dist.is_initialized():
        return None
    if num_ranks == dist.get_world_size():
        return dist.group.WORLD
    group: dist.ProcessGroup = dist.new_subgroups(num_ranks)[0]  # type: ignore[no-untyped-call]
    return group
