"""Construction of models whose parameters are partitioned over the ranks from the start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zero_core.adapters import Recording, find_ranks, recorded, storage_of
from zero_core.errors import ConfigError
from zero_engine.deepspeed.zero.partitioned import PartitionedValue, can_partition, partition


@dataclass(frozen=True)
class Made:
    """Modules and parameters made within `partitioned_init`.

    Attributes:
        modules: in order of making; those that are gone are left out.
        params: those that are partitioned, in that order; empty before the end.
    """

    modules: Mapping[nn.Module, None]
    params: list[nn.Parameter]


@contextmanager
def partitioned_init(
    process_group: dist.ProcessGroup | None = None, *, dtype: torch.dtype | None = None
) -> Iterator[Made]:
    """Make modules without memory in this context, and partition their parameters at its end.

    As `zero_core.deferred_init`, but parameters can be read and changed before the engine is made,
    within `gathered_params`. Their values are rank 0's. Buffers and other tensors get their values
    at the end, each rank its own (`zero_core.build` takes rank 0's). Every rank must enter it and
    make the same modules. Parameters of a class of their own stay whole, and so do integers, which
    have no NaN by which a read would be noticed.

    Args:
        process_group: the ranks to share parameters among; default: all, or one rank alone.
        dtype: floating parameters are cast to it at the end; default: they are left as made.

    Yields:
        The modules and parameters made so far.

    Raises:
        ConfigError: torch.distributed is not initialised where several ranks were started.
        RuntimeError: as `zero_core.deferred_init`.
    """
    ranks = find_ranks(process_group, None)
    control = ranks.connect()
    with recorded() as (recording, modules):
        made = Made(modules, [])
        yield made
    for module in modules:
        for param in module._parameters.values():
            if can_partition(param) and recording.knows(param):
                tape = (recording, param.detach())
                partition(param, PartitionedValue(control, ranks.device, recorded=tape))
                if dtype is not None and param.is_floating_point():
                    param.data = param.to(dtype)
                made.params.append(param)
    _give_the_rest(recording, modules)


@torch.no_grad()
def partition_module(
    module: nn.Module,
    process_group: dist.ProcessGroup | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> list[nn.Parameter]:
    """Partition the parameters of ``module``, which have values. Returns the partitioned ones.

    They get rank 0's values, cast to ``dtype`` if they are floating; their own memory is freed.
    Every rank must call it.
    """
    ranks = find_ranks(process_group, None)
    control = ranks.connect()
    partitioned = []
    for name, param in module.named_parameters():
        if param.is_meta:
            raise ConfigError(
                f"{name} is on the meta device and has no value to shard: make the module within "
                "deepspeed.zero.Init()"
            )
        if not can_partition(param):
            continue
        value = PartitionedValue(control, ranks.device)
        full = param.detach().cpu().contiguous()
        value.send(full, source=0)
        full = full.to(dtype) if dtype is not None and full.is_floating_point() else full
        value.keep(full)
        param.data = torch.empty((), dtype=full.dtype).expand(param.shape)
        partition(param, value)
        partitioned.append(param)
    return partitioned


def _give_the_rest(recording: Recording, modules: Mapping[nn.Module, None]) -> None:
    """Give tensors that are still deferred their values: the same objects, sharing as before."""
    storages: dict[int, torch.UntypedStorage] = {}
    for module in modules:
        kept = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_modules")}
        for tensor in pytree.tree_leaves([kept, *module._parameters.values()]):
            if isinstance(tensor, Tensor) and recording.knows(tensor):
                number = storage_of(tensor)
                value = recording.value(tensor)
                shared = storages.setdefault(number, value.untyped_storage())
                value.set_(shared, value.storage_offset(), value.shape, value.stride())
                if isinstance(tensor, nn.Parameter):
                    value = nn.Parameter(value, tensor.requires_grad)
                torch._C._swap_tensor_impl(tensor, value)
