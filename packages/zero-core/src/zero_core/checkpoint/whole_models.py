"""Import of whole models from safetensors files into an engine, and their export."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from zero_core._torch import save_own_state
from zero_core.checkpoint.safetensors_files import ModelFiles, StoredTensor
from zero_core.core import access
from zero_core.errors import CheckpointError
from zero_core.layout.arithmetic import ParamSpec
from zero_core.layout.discovery import Quantized, plain_name
from zero_core.sharded.sharded_state import ShardedState, load_buffers, named_buffers

_CHUNK_NUMEL = 1 << 22


@dataclass(frozen=True)
class Loaded:
    """Names of tensors that only the model (``missing``) or only the files have."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def match_files(
    state: ShardedState, stored: dict[str, StoredTensor]
) -> tuple[dict[str, StoredTensor], Loaded]:
    """Return ``stored`` by first name in the model, and the names without a match."""
    specs, kept = {spec.name: spec for spec in state.layout.params}, set(state.names())
    for name, buffer in named_buffers(state.module).items():
        if name in kept:
            shape = tuple(buffer.shape)
            specs[name] = ParamSpec(name, shape, buffer.dtype, is_trainable=False)
    spec_of = {n: spec for spec in specs.values() for n in (spec.name, *spec.aliases)}
    by_first: dict[str, dict[str, StoredTensor]] = {}
    unexpected = []
    # foreign: transformers' models have the name of their inner model
    prefix = str(getattr(state.module, "base_model_prefix", ""))
    prefix = f"{prefix}." if prefix else ""
    for stored_name, tensor in stored.items():
        plain = plain_name(stored_name)
        spellings = (plain, prefix + plain, plain.removeprefix(prefix))
        name = next((n for n in spellings if n in spec_of), "")
        if not name:
            unexpected.append(stored_name)
            continue
        spec = spec_of[name]
        found = by_first.setdefault(spec.name, {})
        if name in found:
            raise CheckpointError(f"the files hold {name} twice, with {prefix!r} and without")
        if tensor.shape != spec.shape:
            raise CheckpointError(
                f"{name} has shape {tensor.shape} in {tensor.path} and {spec.shape} in the model"
            )
        is_float = tensor.dtype.is_floating_point
        # fp8 weights have separate scales, so their dtype must match exactly.
        is_exact = spec.is_opaque or (is_float and tensor.dtype.itemsize == 1)
        is_other = is_exact and tensor.dtype != spec.dtype
        if is_other or is_float != spec.dtype.is_floating_point:
            raise CheckpointError(
                f"{name} is {tensor.dtype} in {tensor.path} and {spec.dtype} in the model: "
                "quantized weights must be dequantized first"
            )
        found[name] = tensor

    def not_ignored(what: str, names: list[str]) -> tuple[str, ...]:
        patterns = getattr(state.module, f"_keys_to_ignore_on_load_{what}", None) or ()
        return tuple(n for n in names if not any(re.search(pattern, n) for pattern in patterns))

    missing = not_ignored("missing", [name for name in specs if name not in by_first])
    names = Loaded(missing, not_ignored("unexpected", unexpected))
    return {n: _the_one(state, n, by_first[n]) for n in specs if n in by_first}, names


def _the_one(state: ShardedState, first: str, found: dict[str, StoredTensor]) -> StoredTensor:
    """Return the stored tensor of a weight. If it is tied, check that all copies are equal."""
    name = first if first in found else next(iter(found))
    tensor = found[name]
    rank, size = state.control.rank, state.control.world_size
    # Each rank compares a different range of the elements.
    low, high = tensor.numel * rank // size, tensor.numel * (rank + 1) // size
    for other, copy in found.items():
        for start in range(low, high, _CHUNK_NUMEL) if copy is not tensor else ():
            stop = min(start + _CHUNK_NUMEL, high)
            if not torch.equal(copy.read(start, stop), tensor.read(start, stop)):
                raise CheckpointError(
                    f"{name} and {other} are one weight in the model and two in the files: untie "
                    "them in the model"
                )
    return tensor


def restore_files(
    state: ShardedState, matched: dict[str, StoredTensor], *, rounds_masters: bool
) -> None:
    for write, spec, low, high in state.value_parts():
        if spec.name not in matched:
            continue
        tensor = matched[spec.name]
        # The file has row-major order.
        if spec.order and spec.order != tuple(range(len(spec.shape))):
            values = spec.to_elements(tensor.value())[low:high]
        elif spec.is_opaque:  # ``low`` and ``high`` count bytes
            size = spec.dtype.itemsize
            values = tensor.read(low // size, high // size).view(torch.uint8)
        else:
            values = tensor.read(low, high)
        write(values.to(spec.dtype) if rounds_masters and spec.is_trainable else values)
    params = {spec.name for spec in state.layout.params}
    buffers = {name: tensor.value() for name, tensor in matched.items() if name not in params}
    load_buffers(state.module, buffers)


def full_state_dict(
    state: ShardedState, *, dtype: torch.dtype | None, rank: int | None
) -> dict[str, Tensor]:
    if rank is not None and not 0 <= rank < state.control.world_size:
        raise ValueError(f"rank = {rank}: expected a rank below {state.control.world_size}")
    by_name: dict[str, Tensor] = {}
    # Gathers are collectives: every rank must iterate to the end.
    for keys, value in _entries(state, state.full_params(rank, dtype=dtype), dtype):
        by_name |= dict.fromkeys(keys, value)
    if rank not in (None, state.control.rank):
        return {}
    by_name |= state.buffers()
    # Use torch's order: a module's parameters and buffers precede other entries that it saves.
    by_module: dict[str, list[str]] = {}
    known = state.names()
    for name in known:
        by_module.setdefault(name.rpartition(".")[0], []).append(name)
    extra = by_name.keys() - known
    for key in [key for key in by_name if key in extra]:
        path = key.rpartition(".")[0]
        while path not in by_module:
            path = path.rpartition(".")[0]
        by_module[path].append(key)
    return {key: by_name[key] for keys in by_module.values() for key in keys}


def full_values(state: ShardedState, *, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return whole parameters, and components of quantized ones. Every rank must call it."""
    return {spec.name: _cast(t, spec, dtype) for spec, t in state.full_params(dtype=dtype)}


def _entries(
    state: ShardedState, params: Iterable[tuple[ParamSpec, Tensor]], dtype: torch.dtype | None
) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield (names, value) of each entry of the state dict.

    A module with quantized parameters makes its own entries when all components of its parameters
    have been gathered. In a model of blocks, only one block's components are then in memory.
    """
    whole = {id(q.param): q for q in state.quantized if not q.is_plain}
    # By module path: the module, its quantized parameters, and the names of their components.
    holders: dict[str, tuple[nn.Module, tuple[Quantized, ...], frozenset[str]]] = {}
    for path, module in state.module.named_modules(remove_duplicate=False):
        quantized = tuple(whole[id(p)] for p in module._parameters.values() if id(p) in whole)
        if quantized:
            needed = frozenset(state.param_names[id(c)] for q in quantized for c in q.components)
            holders[plain_name(path)] = (module, quantized, needed)
    waiting = {name for _, _, needed in holders.values() for name in needed}
    found: dict[str, Tensor] = {}
    for spec, tensor in params:
        if spec.name not in waiting:
            yield (spec.name, *spec.aliases), _cast(tensor, spec, dtype).contiguous()
            continue
        found[spec.name] = tensor
        for path, (module, quantized, needed) in list(holders.items()):
            if spec.name in needed and needed <= found.keys():
                del holders[path]
                for key, value in _saved_by(module, path, quantized, state, found).items():
                    yield (key,), value
                for name in needed.difference(*(others for _, _, others in holders.values())):
                    del found[name]


def _saved_by(
    module: nn.Module,
    path: str,
    quantized: Sequence[Quantized],
    state: ShardedState,
    values: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return the state-dict entries that ``module`` makes of its ``quantized`` parameters."""
    prefix = f"{path}." if path else ""
    components = {id(c): c for q in quantized for c in q.components}
    with access.opened(module._parameters.values()):
        try:
            for key, component in components.items():
                component.data = values[state.param_names[key]]
            saved = save_own_state(module, prefix)
        finally:
            for key in components:
                flat, position = state.places[key]
                flat.shown.restore(position)
    whole = {id(q.param) for q in quantized}
    others = [n for n, p in module._parameters.items() if id(p) not in whole]
    for name in (*others, *module._buffers):
        saved.pop(prefix + name, None)
    return saved


def export_safetensors(state: ShardedState, directory: Path, *, dtype: torch.dtype | None) -> Path:
    def write(params: Iterator[tuple[ParamSpec, Tensor]]) -> None:
        files = ModelFiles(directory)
        try:
            # Store a tied weight under one name only, because readers tie weights again.
            for names, value in _entries(state, params, dtype):
                files.add(names[0], value)
            for name, buffer in state.buffers().items():
                files.add(name, buffer)
            files.finish()
        except Exception:
            files.discard()
            raise

    state.control.on_first_rank("export", state.full_params(rank=0, dtype=dtype), write)
    return directory


def _cast(tensor: Tensor, spec: ParamSpec, dtype: torch.dtype | None) -> Tensor:
    is_kept = spec.is_opaque or not tensor.is_floating_point()
    return tensor if is_kept else tensor.to(dtype or spec.dtype)
