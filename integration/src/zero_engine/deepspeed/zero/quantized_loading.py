"""Sharding of a quantized model while its weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from zero_core import engine_of
from zero_core.adapters import (
    find_ranks,
    is_storage_dtype,
    put_in_slices,
    release_free_pages,
    slices,
    stored_tensors,
)
from zero_engine.deepspeed.zero.described import describe
from zero_engine.deepspeed.zero.partitioned import PartitionedValue, can_partition, partition


@contextmanager
def sharded_loading() -> Iterator[None]:
    """Shard each parameter that modules are given in this context, as soon as it is complete.

    Quantized ones are put in slices: see [Note: values in slices] in `zero_core.quantization`.
    Others become partitioned ones. A parameter is complete when another module is given one, since
    quantizers set a module's weight more than once. So besides its slices a rank holds one module.
    A module's forward refuses values in slices. Every rank must enter it, and load the same values.
    """
    ranks = find_ranks(None, None)
    control = ranks.connect()
    waiting: dict[tuple[nn.Module, str], None] = {}

    @torch.no_grad()
    def shard_waiting() -> None:
        for module, name in waiting:
            param = module._parameters.get(name)
            if param is None or param.is_meta:
                continue
            if can_partition(param) and not is_storage_dtype(param.dtype):
                value = PartitionedValue(control, ranks.device)
                value.keep(param)
                partition(param, value)
                describe([param])
            else:
                put_in_slices([component.tensor for component in stored_tensors(param)], control)
                if _check_whole not in module._forward_pre_hooks.values():
                    module.register_forward_pre_hook(_check_whole)
        waiting.clear()
        release_free_pages()

    def note(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if any(other is not module for other, _ in waiting):
            shard_waiting()
        waiting[module, name] = None

    handle = register_module_parameter_registration_hook(note)
    try:
        yield
        shard_waiting()
    finally:
        handle.remove()


def _check_whole(module: nn.Module, args: Any) -> None:
    """Refuse a forward with values in slices. A hook, which ends when an engine has the module."""
    if torch.compiler.is_compiling():
        return
    params = {name: p for name, p in module._parameters.items() if p is not None}
    for name, param in params.items():
        if any(component.tensor in slices for component in stored_tensors(param)):
            raise RuntimeError(
                f"forward of a {type(module).__name__} whose quantized {name} is sharded over the "
                "ranks, as it was loaded under a configuration of stage 3, and no engine has it: "
                "call the engine of deepspeed.initialize(), or compute within "
                "deepspeed.zero.GatheredParameters(model.parameters()), or load the model before "
                "HfDeepSpeedConfig or TrainingArguments(deepspeed=...) is made"
            )
    if any(engine_of(param) is not None for param in params.values()):
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is _check_whole]:
            del hooks[key]
