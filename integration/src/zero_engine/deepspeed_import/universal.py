"""Universal checkpoints: a folder per parameter, as ``ds_to_universal`` writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from zero_core import CheckpointError
from zero_core.checkpoint import is_plain
from zero_core.errors import CheckpointCorruptError
from zero_engine.deepspeed_import.source import (
    MASTER,
    MOMENTS,
    Source,
    SourceParam,
    loss_scale_of,
    make_source,
    named_like,
    storage_ties,
)
from zero_engine.deepspeed_import.torch_files import flat, load_file
from zero_engine.deepspeed_import.zero_stages import (
    frozen_of_stage_3,
    in_rank_order,
    param_groups,
)

FOLDER = "zero"
_FILES = {MASTER: "fp32.pt", **{name: f"{name}.pt" for name in MOMENTS}}


def read_universal(place: Path) -> Source:
    """Read a universal checkpoint."""
    files = sorted(place.glob("zero_pp_rank_*_model_states.pt"))
    is_stage_3 = bool(files)
    files = in_rank_order(files) if is_stage_3 else [place / "mp_rank_00_model_states.pt"]
    models = [load_file(file) for file in files]
    model = models[0]
    if model.get("mp_world_size", 1) != 1:
        raise CheckpointError(
            f"{place} is of tensor or pipeline parallelism, which is not imported"
        )
    optimizer = load_file(place / FOLDER / "optimizer_state.pt")
    ties = {**storage_ties(model), **(model["shared_params"] or {})}
    shapes = dict(param_groups(model))
    step_of = _steps(model, optimizer)
    params = []
    for first, names in named_like(model, ties).items():
        dtype = model["module"][first].dtype
        folder = place / FOLDER / first
        if first in shapes:
            if not is_plain(first) or folder.is_symlink() or folder.parent.is_symlink():
                raise CheckpointCorruptError(
                    f"{place}: parameter {first!r:.100} has no folder of its own in it"
                )
            states = {
                kind: (_value(folder / file),)
                for kind, file in _FILES.items()
                if kind == MASTER or (folder / file).exists()
            }
            step_file = folder / "step.pt"
            step = int(load_file(step_file)) if step_file.exists() else step_of.get(first, 0)
            params.append(SourceParam(names, shapes[first], dtype, states, step=step))
            continue
        if is_stage_3:
            params.append(frozen_of_stage_3(place, names, dtype, models))
        else:
            value = model["module"][first]
            parts = (flat(value, f"{files[0]}: {first}"),)
            params.append(SourceParam(names, tuple(value.shape), dtype, value=parts))
    return make_source(model, params, optimizer["param_groups"], loss_scale_of(optimizer))


def _value(path: Path) -> Tensor:
    """Return the tensor of a file, which stage 3 writes alone and other stages with its form."""
    content = load_file(path)
    if isinstance(content, Mapping):
        if content.get("vocab_tensor"):
            raise CheckpointError(f"{path} is cut to the vocabulary: Megatron's are not imported")
        content = content.get("param")
    if not isinstance(content, Tensor):
        raise CheckpointCorruptError(f"{path} has no tensor")
    return flat(content, str(path))


def _steps(model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> dict[str, int]:
    """Return the steps of parameters without a file of theirs: stage 3's, by sub-group."""
    states = optimizer.get("optimizer_state_dict", {}).get("state", {})
    return {
        name: int(states[index]["step"])
        for index, shapes in enumerate(model["param_shapes"])
        if "step" in states.get(index, {})
        for name in shapes
    }
