"""Exports of the model: a full state dict, and safetensors in Hugging Face's layout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from zero_core.errors import CheckpointError
from zero_core.layout.arithmetic import ParamSpec
from zero_core.sharded.sharded_state import ShardedState

MAX_FILE_BYTES = 5 * 1000**3
INDEX = "model.safetensors.index.json"


def full_state_dict(
    state: ShardedState, *, dtype: torch.dtype | None, rank: int | None
) -> dict[str, Tensor]:
    if rank is not None and not 0 <= rank < state.control.world_size:
        raise ValueError(f"rank = {rank}: expected a rank below {state.control.world_size}")
    by_name: dict[str, Tensor] = {}
    for spec, tensor in state.full_params(rank):  # a collective: every rank goes on to the end
        value = _cast(tensor, dtype or spec.dtype)
        by_name |= dict.fromkeys((spec.name, *spec.aliases), value)
    if rank not in (None, state.control.rank):
        return {}
    by_name |= state.buffers()
    return {key: by_name[key] for key in state.names()}


def export_safetensors(state: ShardedState, directory: Path, *, dtype: torch.dtype | None) -> Path:
    params = _Gathered(state.full_params(rank=0))
    failure: list[Exception] = []
    if state.control.rank == 0:
        values = ((spec.name, _cast(t, dtype or spec.dtype)) for spec, t in params)
        try:
            _write_files(directory, values, state.buffers())
        except Exception as error:
            if params.has_failed:  # the other ranks are within a collective, or failed as well
                raise
            failure.append(error)
    for _ in params:  # a collective: every rank goes on to the end, after an error of a file too
        pass

    def report() -> None:
        if failure:
            raise failure[0]

    state.control.together("export", report)
    return directory


class _Gathered:
    """Iterator over parameters that remembers whether it was gathering that failed."""

    def __init__(self, params: Iterator[tuple[ParamSpec, Tensor]]) -> None:
        self._params = params
        self.has_failed = False

    def __iter__(self) -> Iterator[tuple[ParamSpec, Tensor]]:
        return self

    def __next__(self) -> tuple[ParamSpec, Tensor]:
        try:
            return next(self._params)
        except Exception as error:
            self.has_failed = not isinstance(error, StopIteration)
            raise


def _write_files(
    directory: Path, values: Iterable[tuple[str, Tensor]], buffers: dict[str, Tensor]
) -> None:
    """Write files of at most `MAX_FILE_BYTES`, but for the last one, which has all buffers too."""
    files: list[dict[str, int]] = []  # bytes by tensor name
    batch: dict[str, Tensor] = {}
    try:
        for name, value in values:
            if batch and sum(t.nbytes for t in batch.values()) + value.nbytes > MAX_FILE_BYTES:
                files.append(_write_file(_part(directory, len(files)), batch))
                batch = {}
            batch[name] = value
        files.append(_write_file(_part(directory, len(files)), batch | buffers))
        _name_files(directory, files)
    except Exception:
        for part in directory.glob("part-*.tmp"):
            part.unlink()
        raise


def _write_file(path: Path, tensors: dict[str, Tensor]) -> dict[str, int]:
    """Write a safetensors file, and return the bytes of each tensor."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        # Tied weights are stored once: the readers tie them again.
        save_file({n: t.contiguous() for n, t in tensors.items()}, path, metadata={"format": "pt"})
    except Exception as error:
        raise CheckpointError(
            f"{path} could not be written ({error}): make room there, or give another folder"
        ) from error
    return {name: t.nbytes for name, t in tensors.items()}


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _part(directory: Path, number: int) -> Path:
    """Return the temporary name of a file, used until the number of files is known."""
    return directory / f"part-{number}.tmp"


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
