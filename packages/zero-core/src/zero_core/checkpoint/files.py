"""Format of a checkpoint's folder, and readers that need no engine.

`read_weights` reads the model in a program without ranks.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_core.checkpoint.safetensors_files import StoredTensor, read_header
from zero_core.errors import CheckpointCorruptError, CheckpointError
from zero_core.layout.discovery import plain_name
from zero_core.sharded.sharded_state import MASTER

FORMAT = "zero-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
BUFFERS = "buffers.safetensors"
VALUE = "value"
"""Name of frozen parameters' values, which have no master weight."""
WHOLE = "whole"
"""Name of the files of optimizer states that are whole."""


def slice_key(param: str) -> str:
    """Return the key of a parameter's slice in the file of a state that not all parameters have."""
    return f"/{param}"


def find(directory: Path, tag: str | None) -> Path:
    """Return the folder of checkpoint ``tag``, or of the newest one.

    Raises:
        CheckpointError: there is none.
    """
    if tag is None:
        try:
            tag = (directory / "latest").read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            raise CheckpointError(
                f"{directory} holds no checkpoint (no file 'latest'): check the path, or leave "
                "the resuming out to start from scratch"
            ) from None
    # A save that was killed between its two renames leaves the checkpoint under the old name.
    for place in (directory / tag, directory / f".{tag}.old"):
        if (place / MANIFEST).is_file():
            return place
    raise CheckpointError(f"{directory / tag} is not a checkpoint: there is no {MANIFEST} in it")


def read_manifest(place: Path) -> dict[str, Any]:
    """Return the manifest of the checkpoint in folder ``place``.

    Raises:
        CheckpointError: it is of another format.
        CheckpointCorruptError: it cannot be read.
    """
    try:
        manifest = json.loads((place / MANIFEST).read_bytes())
        is_known = manifest["format"] == FORMAT and manifest["version"] == VERSION
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointCorruptError(f"{place / MANIFEST} is not readable: {error}") from error
    if not is_known:
        raise CheckpointError(
            f"{place} has format {manifest['format']!r} version {manifest['version']!r}; this "
            f"package reads {FORMAT!r} version {VERSION}"
        )
    return _with_plain_names(manifest)


def _with_plain_names(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``manifest`` without wrappers' parts in names: versions before wrote them."""
    params = [
        {**p, "name": plain_name(p["name"]), "aliases": [plain_name(n) for n in p["aliases"]]}
        for p in manifest["params"]
    ]
    segments = [
        {**s, "slots": [[plain_name(name), *span] for name, *span in s["slots"]]}
        for s in manifest["segments"]
    ]
    scalars = {plain_name(name): values for name, values in manifest["scalars"].items()}
    return {**manifest, "params": params, "segments": segments, "scalars": scalars}


def fingerprint(path: Path) -> dict[str, int]:
    """Return size and CRC-32 of a file."""
    crc, size = 0, 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
            size += len(block)
    return {"bytes": size, "crc32": crc}


@dataclass(frozen=True)
class _Place:
    segment: int
    start: int
    shard_numel: int


class Reader:
    """Reader of ranges of parameters' states from the slices that the writing ranks stored."""

    def __init__(self, place: Path, manifest: Mapping[str, Any]) -> None:
        """Read from folder ``place`` with the result of `read_manifest`."""
        self._folder = place
        self._files: dict[str, Mapping[str, StoredTensor]] = {}
        self._places = {
            name: _Place(index, start, segment["shard_numel"])
            for index, segment in enumerate(manifest["segments"])
            for name, start, _ in segment["slots"]
        }

    def read(self, state: str, param: str, start: int, stop: int) -> Tensor:
        """Return elements ``[start, stop)`` of a parameter's ``state``, 1-D, on the CPU."""
        place = self._places[param]
        low, high = place.start + start, place.start + stop
        parts: list[Tensor] = []
        while low < high or not parts:  # an empty parameter has the dtype of the file
            rank, offset = divmod(low, place.shard_numel) if low < high else (0, 0)
            end = max(low, min(high, (rank + 1) * place.shard_numel))
            file = self.tensors(f"{state}-{rank:05d}.safetensors")
            stored = file.get(slice_key(param))
            if stored is None:
                stored = file[str(place.segment)]
            else:  # it begins where the parameter does, or with the rank's shard
                offset -= max(place.start - rank * place.shard_numel, 0)
            parts.append(stored.read(offset, offset + end - low))
            low = end
        return torch.cat(parts)

    def tensors(self, name: str) -> Mapping[str, StoredTensor]:
        """Return the tensors of the safetensors file ``name`` of the folder."""
        if name not in self._files:
            self._files[name] = read_header(self._folder / name)
        return self._files[name]


@dataclass(frozen=True)
class Weight:
    """Parameter of a checkpoint.

    Attributes:
        names: its name and the names tied to it.
        value: the whole value on the CPU, unrounded if it is trained, else in its own dtype.
        dtype: compute dtype.
        is_trainable: whether it is trained.
    """

    names: tuple[str, ...]
    value: Tensor
    dtype: torch.dtype
    is_trainable: bool


def read_weights(directory: Path, tag: str | None = None) -> Iterator[Weight]:
    """Yield every parameter of checkpoint ``tag``, or of the newest, on one process.

    Values of frozen parameters are left out where the checkpoint was saved without them.

    Raises:
        CheckpointError: there is no such checkpoint.
        CheckpointCorruptError: it cannot be read.
    """
    place = find(directory, tag)
    manifest = read_manifest(place)
    reader = Reader(place, manifest)
    for spec in manifest["params"]:
        if not spec["is_trainable"] and not manifest.get("has_frozen", True):
            continue
        state = MASTER if spec["is_trainable"] else VALUE
        flat = reader.read(state, spec["name"], 0, math.prod(spec["shape"]))
        yield Weight(
            names=(spec["name"], *spec["aliases"]),
            value=flat.view(spec["shape"]),
            dtype=getattr(torch, spec["dtype"]),
            is_trainable=spec["is_trainable"],
        )


def read_buffers(directory: Path, tag: str | None = None) -> dict[str, Tensor]:
    """Return the persistent buffers of checkpoint ``tag``, or of the newest."""
    stored = read_header(find(directory, tag) / BUFFERS)
    return {plain_name(name): tensor.value() for name, tensor in stored.items()}
