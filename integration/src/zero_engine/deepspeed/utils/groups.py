"""``deepspeed.utils.groups`` for data parallelism: the world sizes of other kinds are 1."""

from __future__ import annotations

import torch.distributed as dist


def get_data_parallel_group() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None


def get_data_parallel_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def get_data_parallel_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def get_model_parallel_world_size() -> int:
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
