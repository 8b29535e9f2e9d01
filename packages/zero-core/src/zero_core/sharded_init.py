"""Construction of a model whose parameters are sharded over the ranks before there is an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zero_core.collectives import ControlGroup
from zero_core.deferred import recorded
from zero_core.errors import ConfigError
from zero_core.parked import Held, can_park, park
from zero_core.tape import Recording, storage_of
from zero_core.topology import find_ranks

__all__ = ["Made", "shard_module", "sharded_init"]


@dataclass(frozen=True)
class Made:
    """What is made within `sharded_init`.

    Attributes:
        modules: in order of making; those that are gone are left out.
        params: those that are parked, in that order; empty before the end.
    """

    modules: Mapping[nn.Module, None]
    params: list[nn.Parameter]


@contextmanager
def sharded_init(
    process_group: dist.ProcessGroup | None = None, *, dtype: torch.dtype | None = None
) -> Iterator[Made]:
    """Within, modules are made without memory; at the end their parameters are parked.

    As `zero_core.deferred_init`, but parameters can be read and changed before the engine is made:
    within `zero_core.parked.unparked`. Their values are rank 0's; buffers and other tensors get
    their values at the end, each rank its own (`zero_core.build` takes rank 0's). Every rank must
    enter it and make the same modules. Parameters of a class of their own stay whole, and so do
    integers: no value of theirs would be loud.

    Args:
        process_group: the ranks to share parameters among; default: all, or one rank alone.
        dtype: what floating parameters are cast to at the end; default: they are left as made.

    Yields:
        What has been made so far.

    Raises:
        ConfigError: torch.distributed is not initialised where several ranks were started.
        RuntimeError: as `zero_core.deferred_init`.
    """
    make_held = _holder(process_group)
    with recorded() as (recording, modules):
        made = Made(modules, [])
        yield made
    for module in modules:
        for param in module._parameters.values():
            if can_park(param) and recording.knows(param):
                held = make_held()
                held.recorded = (recording, param.detach())
                park(param, held)
                if dtype is not None and param.is_floating_point():
                    param.data = param.to(dtype)
                made.params.append(param)
    _give_the_rest(recording, modules)


@torch.no_grad()
def shard_module(
    module: nn.Module,
    process_group: dist.ProcessGroup | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> list[nn.Parameter]:
    """Park the parameters of ``module``, which have values; the parked ones.

    They get rank 0's values, cast to ``dtype`` if they are floating; their own memory is freed.
    Every rank must call it.

    Raises:
        ConfigError: a parameter is on the meta device.
    """
    make_held = _holder(process_group)
    parked = []
    for name, param in module.named_parameters():
        if param.is_meta:
            raise ConfigError(
                f"{name} is on the meta device and has no value to shard: make the module within "
                "sharded_init() (zero.Init() of DeepSpeed's interface)"
            )
        if not can_park(param):
            continue
        held = make_held()
        value = param.detach().cpu().contiguous()
        held.send(value, source=0)
        held.keep(value.to(dtype) if dtype is not None and value.is_floating_point() else value)
        assert held.part is not None, "just kept"
        param.data = torch.empty((), dtype=held.part.dtype).expand(param.shape)
        park(param, held)
        parked.append(param)
    return parked


def _holder(process_group: dist.ProcessGroup | None) -> Any:
    """What makes a `Held` of the ranks of ``process_group``."""
    ranks = find_ranks(process_group, None)
    control = ControlGroup(ranks.group, rank=ranks.rank, world_size=ranks.size, device=ranks.device)
    return lambda: Held(control, ranks.device)


def _give_the_rest(recording: Recording, modules: Mapping[nn.Module, None]) -> None:
    """Give what is still deferred its value; it stays the same object, and shares as before."""
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
