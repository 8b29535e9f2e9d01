"""Construction of quantized models, one block at a time, into slices.

[Note: values in slices]
Before a build, a tensor may be in *slices*: each rank holds one slice of the tensor's bytes, and
the tensor itself is a placeholder. `zero_core.build` gathers one tensor at a time, so at stage 3 no
rank holds all parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_core._libc import release_free_pages
from zero_core.checkpoint.safetensors_files import StoredTensor, find_tensors
from zero_core.comm.control import ControlGroup
from zero_core.comm.groups import Ranks
from zero_core.comm.topology import find_ranks
from zero_core.errors import CheckpointError, ConfigError
from zero_core.init.values import (
    InitialValues,
    keep_slice,
    make_ordinary,
    put_in_slices,
    slice_range,
)
from zero_core.layout.discovery import components, discover, plain_name


@torch.no_grad()
def quantize_blocks(
    model: nn.Module,
    quantize: Callable[[nn.Module], object],
    *,
    pretrained: str | Path | Sequence[str | Path] | None = None,
    process_group: dist.ProcessGroup | Ranks | None = None,
) -> None:
    """Fill, quantize and slice each block before the next block gets its values.

    For a model made under `zero_core.deferred_init` or, with ``pretrained``, on the meta device. A
    rank's memory holds its slices and one block. Code that reads no values of the base model may
    add adapters afterwards. `zero_core.build` then uses the slices. Every rank must call it, with
    the same arguments.

    Args:
        model: changed in place. Its blocks are those of `zero_core.build`.
        quantize: quantizes one block in place, as ``torchao.quantization.quantize_`` with a
            configuration, to the same bytes on every rank. Its result is ignored.
        pretrained: safetensors of the unquantized weights, as for `zero_core.load_pretrained`.
            Without it, blocks get the recorded values of rank 0.
        process_group: as for `zero_core.build`.

    Raises:
        ConfigError: the model has no blocks, or a value of a block is unknown.
        CheckpointError: ``pretrained`` lacks a parameter, or has another shape for it.
    """
    control = find_ranks(process_group, None).connect()
    found = discover(model)
    blocks = found.units[1 : len(found.units) - found.has_tail]
    if not blocks:
        raise ConfigError(
            "quantize_blocks() found no block: quantize the model itself, before build()"
        )
    source = None if pretrained is None else find_tensors(pretrained)
    # foreign: transformers' models name their inner model
    prefix = str(getattr(model, "base_model_prefix", ""))
    prefix = f"{prefix}." if prefix else ""
    initial = InitialValues(model)
    initial.check(has_pretrained=source is not None, within=tuple(path for path, *_ in blocks))
    for path, block, numbers in blocks:
        for number in numbers:
            param = found.params[number]
            if source is not None:
                value = _find(source, prefix, found.names[number], param).value().to(param.dtype)
            elif param.is_meta:
                value = _of_rank_0(initial.of(param), control)
            else:
                continue
            make_ordinary(param)
            param.data = value
        for part in block.modules():
            for key, buffer in part._buffers.items():
                if buffer is not None and buffer.is_meta:
                    part._buffers[key] = _of_rank_0(initial.of(buffer), control)
        quantize(block)
        kept = {id(param) for param in block.parameters()}
        for number in numbers:
            if id(found.params[number]) not in kept:  # ``quantize`` has replaced the parameter
                found.params[number].data = torch.empty(0)
        for name, own_param in block.named_parameters():
            if not own_param.is_meta:  # a meta parameter is also used outside of the block
                own = components(f"{path}.{name}", own_param)
                put_in_slices([component.tensor for component in own], control)
        release_free_pages()
    if source is not None:  # parameters outside of blocks: each rank reads only its slice
        outside = {*found.units[0][2], *(found.units[-1][2] if found.has_tail else ())}
        for number in sorted(outside):
            outer = found.params[number]
            stored = _find(source, prefix, found.names[number], outer)
            make_ordinary(outer)
            values = stored.read(*slice_range(outer, control)).to(outer.dtype)
            keep_slice(outer, values, control)


def _of_rank_0(value: Tensor, control: ControlGroup) -> Tensor:
    value = value.contiguous()
    control.broadcast(value)
    return value


def _find(
    source: Mapping[str, StoredTensor], prefix: str, names: Sequence[str], param: Tensor
) -> StoredTensor:
    for name in map(plain_name, names):
        for spelling in (name, prefix + name, name.removeprefix(prefix)):
            if (stored := source.get(spelling)) is not None:
                if stored.shape == tuple(param.shape):
                    return stored
                raise CheckpointError(
                    f"{name} has shape {stored.shape} in {stored.path} and "
                    f"{tuple(param.shape)} in the model"
                )
    raise CheckpointError(f"the files lack {names[0]}")
