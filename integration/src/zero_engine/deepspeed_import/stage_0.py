"""Checkpoints without ZeRO: one file with the model and the whole optimizer state.

[Note: names at stage 0]
The file numbers an optimizer's parameters and does not name them. With 16-bit weights, a master
weight is of the parameter whose weights it rounds to. Where several have these (norms that are
still 1), the import is refused. In fp32 shapes must decide: of each shape all parameters are
trained, in one group, or none is. Their order among themselves is assumed to be the model's,
which a line on stderr says.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_core import CheckpointError
from zero_engine.deepspeed_import.source import (
    MASTER,
    Source,
    SourceParam,
    loss_scale_of,
    make_source,
    named_like,
    split_states,
    storage_ties,
)
from zero_engine.deepspeed_import.torch_files import flat, load_file

_States = dict[str, tuple[dict[str, Tensor], int]]
"""Elementwise states and steps by parameter."""


def read_stage_0(place: Path, frozen: Iterable[str]) -> Source:
    """Read a checkpoint without ZeRO. ``frozen`` names parameters that were not trained."""
    model = load_file(place / "mp_rank_00_model_states.pt")
    saved = model["optimizer"]
    if saved is None:
        raise CheckpointError(
            f"{place} has no optimizer state: its files *_optim_states.pt are missing, or it was "
            "saved by an engine without an optimizer"
        )
    inner = saved.get("optimizer_state_dict", saved)
    names = named_like(model, storage_ties(model))
    unknown = sorted(set(frozen) - names.keys())
    if unknown:
        raise CheckpointError(f"{place} has no parameter {unknown[0]}: its names are {list(names)}")
    values = {n: model["module"][n] for n in names if n not in set(frozen)}
    if "fp32_groups_flat" in saved:
        found = _by_flat_masters(place, saved["fp32_groups_flat"], inner, values)
    elif "fp32_groups" in saved:
        found = _by_masters(place, saved["fp32_groups"], inner, values)
    else:
        found = _by_shape(place, inner, values)
    params = []
    for first, all_names in names.items():
        value = model["module"][first]
        states, step = found.get(first, (None, 0))
        parts = (flat(value, f"{place}: {first}"),)
        fragments = None if states is None else {kind: (t,) for kind, t in states.items()}
        kept = parts if states is None else ()
        params.append(
            SourceParam(all_names, tuple(value.shape), value.dtype, fragments, kept, step)
        )
    scale = loss_scale_of(saved, has_zero=False)
    return make_source(model, params, inner["param_groups"], scale)


def _by_shape(place: Path, inner: Mapping[str, Any], values: Mapping[str, Tensor]) -> _States:
    """Identify parameters in fp32 by their shapes and the model's order."""
    by_shape: dict[Any, list[str]] = {}
    for name, value in values.items():
        by_shape.setdefault(value.shape, []).append(name)
    indices = [index for group in inner["param_groups"] for index in group["params"]]
    absent = [index for index in indices if not inner["state"].get(index)]
    shapes = {i: inner["state"][i]["exp_avg"].shape for i in indices if i not in absent}
    if len(inner["param_groups"]) == 1 and len(indices) == len(values):
        order = dict(zip(indices, values, strict=True))
    else:
        order = {}
        for shape, names in by_shape.items():
            alike = [index for index, found in shapes.items() if found == shape]
            owners = [g for g in inner["param_groups"] if set(alike) & set(g["params"])]
            if absent or len(owners) > 1 or len(alike) not in (0, len(names)):
                raise CheckpointError(
                    f"{place} does not say which parameters its optimizer states are of (stage 0 "
                    f"numbers them): {names} have the shape {tuple(shape)}, as {len(alike)} "
                    f"states in {len(owners)} groups. Name the parameters that were frozen, or "
                    "save the checkpoint at stage 1 with DeepSpeed"
                )
            order |= dict(zip(alike, names, strict=False))
    if any(len(names) > 1 for names in by_shape.values()) and order:
        print(
            "note: stage 0 in fp32 does not name parameters. Those of equal shapes are assumed to "
            "have been given to the optimizer in the model's order",
            file=sys.stderr,
            flush=True,
        )
    found: _States = {}
    for index, name in order.items():
        state = inner["state"].get(index) or {}
        where = f"{place}: optimizer state {index}"
        if state and shapes[index] != values[name].shape:
            raise CheckpointError(
                f"{where} has the shape {tuple(shapes[index])}, {name} has "
                f"{tuple(values[name].shape)}: name the parameters that were frozen"
            )
        states, step = split_states(state, where)
        found[name] = {**states, MASTER: flat(values[name], f"{place}: {name}")}, step
    return found


def _by_masters(
    place: Path,
    groups: Sequence[Sequence[Tensor]],
    inner: Mapping[str, Any],
    values: Mapping[str, Tensor],
) -> _States:
    """Identify master weights by the weights that they round to."""
    found: _States = {}
    for number, masters in enumerate(groups):
        indices = inner["param_groups"][number]["params"]
        for index, master in zip(indices, masters, strict=True):
            where = f"{place}: master weight {index}"
            left = {n: v for n, v in values.items() if n not in found and v.shape == master.shape}
            name = _only(where, [n for n, v in left.items() if torch.equal(master.to(v.dtype), v)])
            states, step = split_states(inner["state"].get(index) or {}, where)
            found[name] = {**states, MASTER: flat(master, where)}, step
    return found


def _by_flat_masters(
    place: Path, groups: Sequence[Tensor], inner: Mapping[str, Any], values: Mapping[str, Tensor]
) -> _States:
    """Identify parts of flat master weights by the weights that they round to."""
    found: _States = {}
    for number, group in enumerate(groups):
        where = f"{place}: group {number}"
        master = flat(group, where)
        (index,) = inner["param_groups"][number]["params"]
        states, step = split_states(inner["state"].get(index) or {}, where)
        whole = {**states, MASTER: master}
        start = 0
        while start < master.numel():
            rest = master[start:]
            left = {
                n: v for n, v in values.items() if n not in found and 0 < v.numel() <= rest.numel()
            }
            alike = [
                n
                for n, v in left.items()
                if torch.equal(rest[: v.numel()].view(v.shape).to(v.dtype), v)
            ]
            name = _only(f"{where}, from element {start} on,", alike)
            stop = start + values[name].numel()
            found[name] = {kind: t[start:stop] for kind, t in whole.items()}, step
            start = stop
    return found


def _only(where: str, names: Sequence[str]) -> str:
    """Return the one parameter whose weights a master weight rounds to."""
    if not names:
        raise CheckpointError(
            f"{where} is of no parameter: the weights are not the master weights, rounded; save it "
            "at stage 1 with DeepSpeed"
        )
    if len(names) > 1:
        raise CheckpointError(
            f"{where} rounds to the weights of {len(names)} parameters, among them {names[:5]}, "
            "and stage 0 does not say whose it is. Name the parameters that were frozen, or save "
            "the checkpoint at stage 1 with DeepSpeed"
        )
    return names[0]
