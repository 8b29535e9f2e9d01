"""Exports of the model: a full state dict, and safetensors in Hugging Face's layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor, nn

from zero_core._torch import save_own_state
from zero_core.checkpoint.safetensors_files import ModelFiles
from zero_core.core import access
from zero_core.layout.arithmetic import ParamSpec
from zero_core.layout.discovery import Quantized, plain_name
from zero_core.sharded.sharded_state import ShardedState


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
