"""Export of a sharded model with peft's adapters merged into it.

    export_merged(trainer.model, "merged")
    AutoModelForCausalLM.from_pretrained("merged")

Values equal those of ``model.merge_and_unload().save_pretrained(folder)`` without sharding.
Parameters are gathered one unit at a time. Each adapted layer is copied, merged by peft's ``merge``
and written. The model itself is not changed. Files of a quantized base hold dequantized weights.
The module needs peft.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import MultiheadAttention
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.integrations import dequantize_module_weight, get_bnb_param_type
from peft.utils.other import AuxiliaryTrainingWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

import zero_core
from zero_core import ConfigError, ShardedModel
from zero_core.checkpoint import ModelFiles, local_path

_ADAPTED = (BaseTunerLayer, AuxiliaryTrainingWrapper)


class _Part(NamedTuple):
    """A module of the base model. A module that peft replaced includes its submodules."""

    path: str
    module: nn.Module
    is_adapted: bool
    params: tuple[nn.Parameter, ...]


@torch.no_grad()
def export_merged(
    model: nn.Module,
    directory: str | Path,
    *,
    adapter_names: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write the base model with adapters merged in, as Hugging Face's ``from_pretrained`` reads it.

    Every rank must call it, between two steps. Rank 0 writes safetensors, ``config.json`` and
    ``generation_config.json``. Besides its shards a rank holds one gathered unit, and rank 0 a copy
    of one layer. Returns the folder.

    Args:
        model: result of ``peft.get_peft_model``, trained by an engine at any stage.
        directory: folder, which is made if necessary.
        adapter_names: adapters to merge. Default: the active ones.
        dtype: dtype of floating values. Default: each weight's own, or what its quantizer returns.

    Raises:
        ConfigError: there is no engine, the adapters cannot be merged, or the base cannot be
            dequantized.
        CheckpointError: on every rank, if a merge failed, the disk is full, or ``directory`` is a
            URL.
    """
    directory = local_path(directory, "an export")
    base = _base_of(model)
    engine = zero_core.engine_of(next(base.parameters()))
    if engine is None:
        raise ConfigError(
            "export_merged(): no engine has this model's parameters. Call it after the engine is "
            "made and before unwrap(), or use model.merge_and_unload().save_pretrained()"
        )
    parts = list(_parts(base))
    _check(parts, engine)
    names, adapted = _names(parts)
    state = engine.sharded_state

    def unit_of(part: _Part) -> int | None:
        return state.places_of[id(part.params[0])][0][0].segment.unit if part.params else None

    def gathered() -> Iterator[list[_Part]]:
        for _, group in groupby(parts, key=unit_of):
            members = list(group)
            with engine.gathered(params=[p for part in members for p in part.params]):
                yield members

    def write(units: Iterator[list[_Part]]) -> None:
        files, written = ModelFiles(directory), set[str]()
        try:
            for part in chain.from_iterable(units):
                for name, value in _values(part, names, adapted, adapter_names):
                    if name not in written:  # a tied weight is stored once
                        is_cast = dtype is not None and value.is_floating_point()
                        files.add(name, value.to(dtype) if is_cast else value)
                        written.add(name)
            files.finish()
            _save_config(base, directory, written)
        except Exception:
            files.discard()
            raise

    state.control.on_first_rank("export_merged()", gathered(), write)
    return directory


def _base_of(model: nn.Module) -> PreTrainedModel:
    inner = model.base_model if isinstance(model, PeftModel) else model
    base = inner.model if isinstance(inner, BaseTuner) else None
    if not isinstance(base, PreTrainedModel):
        raise ConfigError(
            f"export_merged() was given a {type(model).__name__} of {type(inner).__name__}: it "
            "needs the PeftModel that get_peft_model() makes of a transformers model, with "
            "adapters that can be merged (no prompts)"
        )
    return base


def _parts(base: nn.Module) -> Iterator[_Part]:
    inside = ""
    for path, module in base.named_modules():
        if inside and path.startswith(inside):
            continue
        is_adapted = isinstance(module, _ADAPTED)
        params = tuple(module.parameters(recurse=is_adapted))
        if is_adapted:
            inside = f"{path}."
        if is_adapted or params or any(True for _ in _buffers(module, path)):
            yield _Part(path, module, is_adapted, params)


def _buffers(module: nn.Module, path: str) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in module.named_buffers(path, recurse=False):
        if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
            yield name, buffer


def _check(parts: Sequence[_Part], engine: ShardedModel) -> None:
    quantized = {id(q.param): q for q in engine.sharded_state.quantized}
    for part in parts:
        for param in part.params:
            if id(param) not in quantized:
                continue
            name = quantized[id(param)].name
            if not _can_dequantize(param):
                raise ConfigError(
                    f"export_merged(): {name} is stored as {param.dtype}, and its class, "
                    f"{type(param).__name__}, has no dequantize(): save the adapters alone by "
                    "save_pretrained()"
                )
            if part.is_adapted and not isinstance(part.module, LoraLayer):
                raise ConfigError(
                    f"export_merged(): {name} is quantized and adapted by "
                    f"{type(part.module).__name__}: on quantized weights LoRA alone is merged"
                )


def _names(parts: Sequence[_Part]) -> tuple[dict[int, str], frozenset[int]]:
    """Return first names of parameters by ``id``, and ids of those that adapted modules change."""
    first: dict[int, str] = {}
    adapted: dict[int, _Part] = {}
    for part in parts:
        layer = _base_layer(part.module) if part.is_adapted else part.module
        own = () if layer is None else layer.named_parameters(part.path, recurse=False)
        for name, param in own:
            first.setdefault(id(param), name)
            other = adapted.get(id(param))
            if other is not None and isinstance(part.module, BaseTunerLayer):
                raise ConfigError(
                    f"export_merged(): {other.path} and {part.path} have one tied weight, and both "
                    "are adapted: adapt one of them, or untie them before get_peft_model()"
                )
            if part.is_adapted:
                adapted[id(param)] = part
    return first, frozenset(adapted)


def _base_layer(adapted: nn.Module) -> nn.Module | None:
    if isinstance(adapted, TrainableTokensWrapper):
        adapted = adapted.token_adapter
    return adapted.get_base_layer() if isinstance(adapted, BaseTunerLayer) else None


def _values(
    part: _Part, names: dict[int, str], adapted: frozenset[int], adapter_names: Sequence[str] | None
) -> Iterator[tuple[str, Tensor]]:
    if not part.is_adapted:
        is_quantized = any(_can_dequantize(p) for p in part.params)
        module = _dequantized(copy.deepcopy(part.module)) if is_quantized else part.module
        values = dict(module.named_parameters(part.path, recurse=False))
        for name, param in part.module.named_parameters(part.path, recurse=False):
            if id(param) not in adapted:
                yield names[id(param)], values[name]
        yield from _buffers(module, part.path)
        return
    layer = _base_layer(part.module)
    own = () if layer is None else layer.named_parameters(part.path, recurse=False)
    tied = {name: names[id(param)] for name, param in own}
    merged = _merged(copy.deepcopy(part.module), adapter_names)
    for name, param in merged.named_parameters(part.path):
        yield tied.get(name, name), param
    for path, module in merged.named_modules(prefix=part.path):
        yield from _buffers(module, path)


def _merged(adapted: Any, adapter_names: Sequence[str] | None) -> nn.Module:
    chosen = None if adapter_names is None else list(adapter_names)
    layer = _base_layer(adapted)
    is_quantized = layer is not None and any(map(_can_dequantize, layer.parameters(recurse=False)))
    if layer is not None:
        _dequantized(layer)
    if isinstance(adapted, AuxiliaryTrainingWrapper | MultiheadAttention):
        found = adapted.unload_and_optionally_merge_module(
            merge=True, safe_merge=False, adapter_names=chosen
        )
    else:
        if is_quantized and isinstance(layer, nn.Linear):
            # The quantized layer's own merge would quantize the result.
            LoraLinear.merge(adapted, adapter_names=chosen)
        else:
            adapted.merge(adapter_names=chosen)
        found = adapted.get_base_layer()
    assert isinstance(found, nn.Module)
    return found


def _can_dequantize(param: nn.Parameter) -> bool:
    return bool(get_bnb_param_type(param)) or type(param).dequantize is not Tensor.dequantize


def _dequantized(module: nn.Module) -> nn.Module:
    """Replace the quantized parameters of ``module``, a copy, by plain ones."""
    for name, param in list(module.named_parameters(recurse=False)):
        if _can_dequantize(param):
            is_bnb = get_bnb_param_type(param)
            value = dequantize_module_weight(module) if is_bnb else param.dequantize()
            setattr(module, name, nn.Parameter(value, requires_grad=False))
    return module


def _save_config(base: Any, directory: Path, written: set[str]) -> None:
    config = copy.deepcopy(base.config)
    if "quantization_config" in vars(config):
        del config.quantization_config
    config.architectures = [type(base).__name__]
    if vars(config).get("tie_word_embeddings"):
        # Both embeddings are in the files if training has untied them.
        ends = (base.get_input_embeddings(), base.get_output_embeddings())
        paths = [path for path, module in base.named_modules() if module in ends]
        if len(paths) == 2 and all(f"{path}.weight" in written for path in paths):
            config.tie_word_embeddings = False
    config.save_pretrained(directory)
    if base.can_generate():
        base.generation_config.save_pretrained(directory)
