"""Whole models: read from safetensors files into an engine, and exported.

In a load every rank reads its own ranges of the files. Exports are a full state dict, and
safetensors in Hugging Face's layout.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from zero_core._torch import save_own_state
from zero_core.checkpoint.safetensors_files import ModelFiles, StoredTensor, find_tensors
from zero_core.config import Config
from zero_core.core import access
from zero_core.errors import CheckpointError
from zero_core.layout.arithmetic import ParamSpec
from zero_core.layout.discovery import Quantized, plain_name
from zero_core.sharded.sharded_state import MASTER, ShardedState, load_buffers, named_buffers

_CHUNK_NUMEL = 1 << 22


@dataclass(frozen=True)
class Loaded:
    """Names that did not match.

    Attributes:
        missing: names of the model that the files lack.
        unexpected: names of the files that the model lacks.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


class Loadable(Protocol):
    """Engine as `load_pretrained` uses it."""

    config: Config

    @property
    def micro_steps(self) -> int: ...

    @property
    def sharded_state(self) -> ShardedState: ...

    def rewriting(self) -> AbstractContextManager[None]: ...


def load_pretrained(
    engine: Loadable, source: str | Path | Sequence[str | Path], *, strict: bool = True
) -> Loaded:
    """Load the weights of safetensors files into the engine, and return the unmatched names.

    Every rank must call it, and must see the files; each reads the ranges that it keeps. Master
    weights take the file's precision, unless ``data_types.master_weights_from`` is "rounded";
    parameters and buffers are cast to their dtype. A tied weight may be in the file by any of its
    names. Names with and without Hugging Face's ``base_model_prefix`` are matched, and what the
    model declares in ``_keys_to_ignore_on_load_missing`` and ``..._unexpected`` is ignored. All
    names, shapes and files are checked before anything is changed. Gradients of a backward without
    a step are dropped.

    Args:
        engine: fresh from `zero_core.build`: moments of other weights would be wrong for these.
        source: a safetensors file, several, or a folder with ``model.safetensors`` or
            ``model.safetensors.index.json``.
        strict: whether every parameter and persistent buffer must be there, and nothing else.

    Raises:
        CheckpointError: names or shapes do not fit, the engine has run a step, or a rank failed; if
            it failed to read after the checks, the values are undefined: build the engine anew.
        CheckpointCorruptError: a file is not whole.
    """
    if engine.micro_steps:
        raise CheckpointError(
            f"load_pretrained() after {engine.micro_steps} micro-steps: the optimizer's state "
            "belongs to other weights; load into a fresh engine, or set weights by engine.states"
        )
    state = engine.sharded_state

    def check() -> tuple[dict[str, StoredTensor], Loaded, bytes]:
        stored = find_tensors(source)
        matched, names = _match(state, stored)
        if strict and (names.missing or names.unexpected):
            raise CheckpointError(
                f"{source} does not fit the model: missing {_some(names.missing)}, unexpected "
                f"{_some(names.unexpected)}; strict=False leaves both as they are"
            )
        described = repr([(n, t.shape, t.dtype, t.start) for n, t in stored.items()])
        return matched, names, hashlib.sha256(described.encode()).digest()

    matched, names, digest = state.control.together("load_pretrained: check", check)
    if len(set(state.control.gather_bytes(digest))) > 1:
        raise CheckpointError(f"load_pretrained: ranks see different files at {source}")
    with engine.rewriting():
        state.quiesce()
        state.control.place.unfinished = "load_pretrained()"
        rounds = engine.config.data_types.master_weights_from == "rounded"
        restore = partial(_restore, state, matched, rounds_masters=rounds)
        state.control.together("load_pretrained: read", restore)
    return names


def _match(
    state: ShardedState, stored: dict[str, StoredTensor]
) -> tuple[dict[str, StoredTensor], Loaded]:
    """Return the stored tensors of parameters, by their first name, and of buffers."""
    specs, kept = {spec.name: spec for spec in state.layout.params}, set(state.names())
    for name, buffer in named_buffers(state.module).items():
        if name in kept:
            shape = tuple(buffer.shape)
            specs[name] = ParamSpec(name, shape, buffer.dtype, is_trainable=False)
    first_of = {n: s.name for s in specs.values() for n in (s.name, *s.aliases)}
    by_target: dict[str, dict[str, StoredTensor]] = {}
    unexpected = []
    # foreign: transformers' models name their inner model
    prefix = str(getattr(state.module, "base_model_prefix", ""))
    prefix = f"{prefix}." if prefix else ""
    for name, tensor in stored.items():
        plain = plain_name(name)
        spellings = (plain, prefix + plain, plain.removeprefix(prefix))
        target = next((n for n in spellings if n in first_of), None)
        if target is None:
            unexpected.append(name)
        elif target in by_target.setdefault(first_of[target], {}):
            raise CheckpointError(f"the files hold {target} twice, with {prefix!r} and without")
        else:
            by_target[first_of[target]][target] = tensor
    found = [name for name in specs if name in by_target]
    for spec in (specs[first] for first in found):
        for name, tensor in by_target[spec.name].items():
            if tensor.shape != spec.shape:
                raise CheckpointError(
                    f"{name} has shape {tensor.shape} in {tensor.path} and {spec.shape} in the "
                    "model"
                )
            is_float, is_one_byte = tensor.dtype.is_floating_point, tensor.dtype.itemsize == 1
            is_exact = spec.is_opaque or (is_float and is_one_byte)  # fp8 has scales beside it
            if is_float != spec.dtype.is_floating_point or (
                is_exact and tensor.dtype != spec.dtype
            ):
                raise CheckpointError(
                    f"{name} is {tensor.dtype} in {tensor.path} and {spec.dtype} in the model: "
                    "quantized weights must be dequantized first"
                )
    missing = [name for name in specs if name not in by_target]
    names = Loaded(
        _not_ignored(state.module, "_keys_to_ignore_on_load_missing", missing),
        _not_ignored(state.module, "_keys_to_ignore_on_load_unexpected", unexpected),
    )
    return {first: _the_one(state, first, by_target[first]) for first in found}, names


def _not_ignored(module: nn.Module, attribute: str, names: list[str]) -> tuple[str, ...]:
    """Return the names that no pattern of a Hugging Face model's ``attribute`` matches."""
    patterns = getattr(module, attribute, None) or ()
    return tuple(n for n in names if not any(re.search(pattern, n) for pattern in patterns))


def _the_one(state: ShardedState, first: str, found: dict[str, StoredTensor]) -> StoredTensor:
    """Return the values of a tied weight, after a check that all its copies in the files agree."""
    name = first if first in found else next(iter(found))
    tensor = found[name]
    rank, size = state.control.rank, state.control.world_size
    # Each rank compares a part.
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


def _some(names: tuple[str, ...]) -> str:
    if len(names) <= 10:
        return f"[{', '.join(names)}]"
    return f"[{', '.join(names[:10])}, ... ({len(names)} in all)]"


def _restore(
    state: ShardedState, matched: dict[str, StoredTensor], *, rounds_masters: bool
) -> None:
    for piece in state.pieces:
        spec = state.layout.params[piece.param]
        if spec.name in matched:
            stop = piece.offset + piece.stop - piece.start
            values = _elements(matched[spec.name], spec, piece.offset, stop)
            if rounds_masters:
                values = values.to(state.layout.segments[piece.segment].dtype)
            state.tier.write_state(MASTER, piece.start, values)
    for store, spec, low, high in state.frozen_parts():
        if spec.name in matched:
            store(_elements(matched[spec.name], spec, low, high))
    params = {spec.name for spec in state.layout.params}
    buffers = {name: tensor.value() for name, tensor in matched.items() if name not in params}
    load_buffers(state.module, buffers)


def _elements(tensor: StoredTensor, spec: ParamSpec, low: int, high: int) -> Tensor:
    """Read elements ``[low, high)`` of the parameter's slot: bytes of a component."""
    if spec.order and spec.order != tuple(range(len(spec.shape))):  # the file's is of indices
        return spec.to_elements(tensor.value())[low:high]
    if not spec.is_opaque:
        return tensor.read(low, high)
    size = spec.dtype.itemsize
    return tensor.read(low // size, high // size).view(torch.uint8)


def full_state_dict(
    state: ShardedState, *, dtype: torch.dtype | None, rank: int | None
) -> dict[str, Tensor]:
    if rank is not None and not 0 <= rank < state.control.world_size:
        raise ValueError(f"rank = {rank}: expected a rank below {state.control.world_size}")
    by_name: dict[str, Tensor] = {}
    # a collective: every rank goes on to the end
    for keys, value in _entries(state, state.full_params(rank, dtype=dtype), dtype):
        by_name |= dict.fromkeys(keys, value)
    if rank not in (None, state.control.rank):
        return {}
    by_name |= state.buffers()
    # In torch's order: a module's names, and behind them what it saves besides.
    names, extra = state.names(), defaultdict[str, list[str]](list)
    known, paths = set(names), {name.rpartition(".")[0] for name in names}
    for key in [key for key in by_name if key not in known]:
        path = key.rpartition(".")[0]
        while path not in paths:
            path = path.rpartition(".")[0]
        extra[path].append(key)
    ordered: list[str] = []
    for path, own in groupby(names, key=lambda name: name.rpartition(".")[0]):
        ordered += [*own, *extra[path]]
    return {key: by_name[key] for key in ordered}


def full_values(state: ShardedState, *, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return all values by the layout's names, those of components included."""
    return {spec.name: _cast(t, spec, dtype) for spec, t in state.full_params(dtype=dtype)}


def _entries(
    state: ShardedState, params: Iterable[tuple[ParamSpec, Tensor]], dtype: torch.dtype | None
) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Yield the state dict's parameters, each with its names.

    A module that holds quantized parameters saves these itself, as soon as all of their components
    are there: in a model of blocks, those of one block at a time.
    """
    whole = {id(q.param): q for q in state.quantized if not q.is_plain}
    # Each module with quantized parameters by path, these, and their components' names.
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
    """Return what a module itself saves of ``quantized`` parameters, from ``values`` by name."""
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
    failure: list[Exception] = []
    has_gathered = True

    def gather() -> Iterator[tuple[ParamSpec, Tensor]]:
        nonlocal has_gathered
        try:
            yield from state.full_params(rank=0, dtype=dtype)
        except Exception:
            has_gathered = False
            raise

    params = gather()
    if state.control.rank == 0:
        files = ModelFiles(directory)
        try:
            # Tied weights are stored once: the readers tie them again.
            for names, value in _entries(state, params, dtype):
                files.add(names[0], value)
            for name, buffer in state.buffers().items():
                files.add(name, buffer)
            files.finish()
        except Exception as error:
            files.discard()
            if not has_gathered:  # the other ranks are within a collective, or failed as well
                raise
            failure.append(error)
    for _ in params:  # a collective: every rank goes on to the end, after an error of a file too
        pass

    def report() -> None:
        if failure:
            raise failure[0]

    state.control.together("export", report)
    return directory


def _cast(tensor: Tensor, spec: ParamSpec, dtype: torch.dtype | None) -> Tensor:
    is_kept = spec.is_opaque or not tensor.is_floating_point()
    return tensor if is_kept else tensor.to(dtype or spec.dtype)
