"""The model as others read it: a full state dict, and safetensors as Hugging Face lays them out."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from zero_core.state import ShardedState

__all__ = ["export_safetensors", "full_state_dict"]

MAX_FILE_BYTES = 5 * 1000**3


def full_state_dict(state: ShardedState, *, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """See `zero_core.Engine.full_state_dict`."""
    by_name: dict[str, Tensor] = {}
    for spec, tensor in state.full_params():
        value = _cast(tensor, dtype or spec.dtype)
        by_name |= dict.fromkeys((spec.name, *spec.aliases), value)
    by_name |= state.buffers()
    return {key: by_name[key] for key in state.module.state_dict() if key in by_name}


def export_safetensors(state: ShardedState, directory: Path, *, dtype: torch.dtype | None) -> Path:
    """See `zero_core.Engine.export_safetensors`."""
    is_writer = state.control.rank == 0
    if is_writer:
        directory.mkdir(parents=True, exist_ok=True)
    files: list[dict[str, int]] = []  # bytes by tensor name
    batch: dict[str, Tensor] = {}
    kept = set(state.module.state_dict())
    for spec, tensor in state.full_params():
        if is_writer and spec.name in kept:
            value = _cast(tensor, dtype or spec.dtype)
            if batch and _nbytes(batch) + value.nbytes > MAX_FILE_BYTES:
                files.append(_write(directory, len(files), batch))
                batch = {}
            batch[spec.name] = value
    if is_writer:
        batch |= state.buffers()
        files.append(_write(directory, len(files), batch))
        _name_files(directory, files)
    state.control.barrier()
    return directory


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _nbytes(batch: dict[str, Tensor]) -> int:
    return sum(t.nbytes for t in batch.values())


def _write(directory: Path, index: int, batch: dict[str, Tensor]) -> dict[str, int]:
    # Tied weights are stored once: the readers tie them again.
    save_file(
        {name: t.contiguous() for name, t in batch.items()},
        directory / f"part-{index}.tmp",
        metadata={"format": "pt"},
    )
    return {name: t.nbytes for name, t in batch.items()}


def _name_files(directory: Path, files: list[dict[str, int]]) -> None:
    """Give the parts their final names, now that their number is known, and write the index."""
    if len(files) == 1:
        (directory / "part-0.tmp").replace(directory / "model.safetensors")
        return
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for index, name in enumerate(names):
        (directory / f"part-{index}.tmp").replace(directory / name)
    index_text = json.dumps(
        {
            "metadata": {"total_size": sum(sum(f.values()) for f in files)},
            "weight_map": {t: n for n, f in zip(names, files, strict=True) for t in f},
        },
        indent=2,
    )
    (directory / "model.safetensors.index.json").write_text(index_text, encoding="utf-8")
