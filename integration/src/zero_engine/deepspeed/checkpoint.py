"""``deepspeed.checkpoint``: copies of tensors to save, and files under DeepSpeed's names.

[Note: stand-in files]
Tools check whether a checkpoint has DeepSpeed's files (``mp_rank_00_model_states.pt``, ...).
Checkpoints of this engine therefore have small JSON files of these names. They hold no tensor
and name the manifest. They are written after it, so an incomplete checkpoint has none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_core import CheckpointError
from zero_core.checkpoint import MANIFEST, local_path, read_latest

_CPU = torch.device("cpu")
_FILES = "*mp_rank_*_states.pt"
"""Pattern of DeepSpeed's files, such as ``zero_pp_rank_0_mp_rank_00_optim_states.pt``."""


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = _CPU) -> Any:
    """Return ``item`` with the tensors in its lists, tuples and dicts copied to ``device``.

    A parameter may be a view of a large buffer, and torch.save would write the whole buffer.
    """
    if isinstance(item, Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, list):
        return [clone_tensors_for_torch_save(v, device) for v in item]
    if isinstance(item, tuple):
        return tuple(clone_tensors_for_torch_save(v, device) for v in item)
    if isinstance(item, dict):
        return type(item)({k: clone_tensors_for_torch_save(v, device) for k, v in item.items()})
    return item


def without_ties(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keep only the first name of each tensor, because safetensors refuses shared memory."""
    once: dict[int, str] = {}
    for name, value in state.items():
        once.setdefault(value.data_ptr() if value.numel() else id(value), name)
    return {name: state[name].contiguous() for name in once.values()}


def write_stand_ins(place: Path, *, rank: int, stage: int, is_bf16: bool) -> None:
    """Write this rank's files of [Note: stand-in files] into the complete checkpoint ``place``."""
    prefix = f"zero_pp_rank_{rank}_"
    names = [f"{prefix if stage == 3 else ''}mp_rank_00_model_states.pt"]
    if stage < 3 and rank != 0:
        names = []
    if stage > 0:
        names.append(f"{'bf16_' if is_bf16 else ''}{prefix}mp_rank_00_optim_states.pt")
    content = {
        "format": "zero-engine-stand-in",
        "values": MANIFEST,
        "read_by": f"python {Path('..', 'zero_to_fp32.py')} .. OUTPUT_DIR",
    }
    for name in names:
        place.joinpath(name).write_text(json.dumps(content), encoding="utf-8")


def refuse_foreign(directory: str | Path, tag: object = None) -> None:
    """Raise CheckpointError if DeepSpeed wrote the checkpoint. A ``tag`` of None is the newest."""
    folder = local_path(directory, "a checkpoint of DeepSpeed's names")
    if tag is None:
        tag = read_latest(folder)
    place = folder if tag is None else folder / str(tag)
    if place.joinpath(MANIFEST).is_file():
        return  # this engine wrote the checkpoint
    found = min((path.name for path in place.glob(_FILES)), default=None)
    if found is not None:
        raise CheckpointError(
            f"{place} was written by DeepSpeed itself (it holds {found}), as pickles, which are "
            f"not read here. `zero-engine import {directory} NEW_FOLDER` writes weights, optimizer "
            "state and counters as a checkpoint for load_checkpoint('NEW_FOLDER'); "
            "load_checkpoint(..., from_deepspeed='NEW_FOLDER') does both"
        )
