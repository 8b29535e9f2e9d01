"""Pretrained weights: every rank reads its own ranges of safetensors files into an engine."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from zero_core.checkpoint.safetensors_files import StoredTensor, find_tensors
from zero_core.config import Config
from zero_core.errors import CheckpointError
from zero_core.layout.arithmetic import ParamSpec
from zero_core.layout.discovery import plain_name
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
    for first in found:
        for name, tensor in by_target[first].items():
            _check_fits(name, tensor, specs[first])
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


def _check_fits(name: str, tensor: StoredTensor, spec: ParamSpec) -> None:
    if tensor.shape != spec.shape:
        raise CheckpointError(
            f"{name} has shape {tensor.shape} in {tensor.path} and {spec.shape} in the model"
        )
    is_fp8 = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1  # has scales beside it
    is_exact = is_fp8 or spec.is_opaque
    if tensor.dtype.is_floating_point != spec.dtype.is_floating_point or (
        is_exact and tensor.dtype != spec.dtype
    ):
        raise CheckpointError(
            f"{name} is {tensor.dtype} in {tensor.path} and {spec.dtype} in the model: quantized "
            "weights must be dequantized first"
        )


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
