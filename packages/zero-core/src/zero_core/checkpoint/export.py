"""Exports of the model: a full state dict, and safetensors in Hugging Face's layout."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from zero_core.errors import CheckpointError
from zero_core.sharded.sharded_state import ShardedState

MAX_FILE_BYTES = 5 * 1000**3
INDEX = "model.safetensors.index.json"


def full_state_dict(
    state: ShardedState, *, dtype: torch.dtype | None, rank: int | None
) -> dict[str, Tensor]:
    if rank is not None and not 0 <= rank < state.control.world_size:
        raise ValueError(f"rank = {rank}: expected a rank below {state.control.world_size}")
    by_name: dict[str, Tensor] = {}
    is_wanted = rank in (None, state.control.rank)
    for spec, tensor in state.full_params():  # a collective: every rank goes on to the end
        if not is_wanted:
            continue
        value = _cast(tensor, dtype or spec.dtype)
        by_name |= dict.fromkeys((spec.name, *spec.aliases), value)
    if not is_wanted:
        return {}
    by_name |= state.buffers()
    return {key: by_name[key] for key in state.names()}


def export_safetensors(state: ShardedState, directory: Path, *, dtype: torch.dtype | None) -> Path:
    writer = _Writer(directory) if state.control.rank == 0 else None
    for spec, tensor in state.full_params():  # a collective: every rank goes on to the end
        if writer is not None:
            writer.add(spec.name, _cast(tensor, dtype or spec.dtype))

    def finish() -> None:
        if writer is not None:
            writer.finish(state.buffers())

    state.control.together("export", finish)
    return directory


class _Writer:
    """Writer of files of at most `MAX_FILE_BYTES`. Errors are raised by `finish`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: list[dict[str, int]] = []  # bytes by tensor name
        self._batch: dict[str, Tensor] = {}
        self._error: Exception | None = None

    def add(self, name: str, value: Tensor) -> None:
        if self._error is not None:
            return
        if self._batch and _nbytes(self._batch) + value.nbytes > MAX_FILE_BYTES:
            try:
                self._flush()
            except Exception as error:  # safetensors' own too: the other ranks are on their way
                self._error, self._batch = error, {}
                return
        self._batch[name] = value

    def finish(self, buffers: dict[str, Tensor]) -> None:
        try:
            if self._error is not None:
                raise self._error
            self._batch |= buffers
            self._flush()
            _name_files(self._directory, self._files)
        except Exception:
            for part in self._directory.glob("part-*.tmp"):
                part.unlink()
            raise

    def _flush(self) -> None:
        path = _part(self._directory, len(self._files))
        self._directory.mkdir(parents=True, exist_ok=True)
        # Tied weights are stored once: the readers tie them again.
        tensors = {name: t.contiguous() for name, t in self._batch.items()}
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except Exception as error:
            raise CheckpointError(
                f"{path} could not be written ({error}): make room there, or give another folder"
            ) from error
        self._files.append({name: t.nbytes for name, t in self._batch.items()})
        self._batch = {}


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _part(directory: Path, number: int) -> Path:
    """Return the temporary name of a file, used until the number of files is known."""
    return directory / f"part-{number}.tmp"


def _nbytes(batch: dict[str, Tensor]) -> int:
    return sum(t.nbytes for t in batch.values())


def _name_files(directory: Path, files: list[dict[str, int]]) -> None:
    """Rename the parts to their final names and write the index."""
    # An earlier export of another size must not stand beside this one: readers take the first.
    for old in (*directory.glob("model*.safetensors"), directory / INDEX):
        old.unlink(missing_ok=True)
    if len(files) == 1:
        _part(directory, 0).replace(directory / "model.safetensors")
        return
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for index, name in enumerate(names):
        _part(directory, index).replace(directory / name)
    index_text = json.dumps(
        {
            "metadata": {"total_size": sum(sum(f.values()) for f in files)},
            "weight_map": {t: n for n, f in zip(names, files, strict=True) for t in f},
        },
        indent=2,
    )
    (directory / INDEX).write_text(index_text, encoding="utf-8")
