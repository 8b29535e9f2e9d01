"""What lies in a checkpoint's folder, and how it is read without an engine.

`zero_core.checkpoint` writes and restores checkpoints; here is where their parts are found. A
program without ranks gets the model out of one by `read_weights`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from zero_core.errors import CheckpointCorruptError, CheckpointError
from zero_core.state import MASTER

__all__ = [
    "FORMAT",
    "MANIFEST",
    "VALUE",
    "VERSION",
    "Reader",
    "Weight",
    "find",
    "read_buffers",
    "read_manifest",
    "read_weights",
]

FORMAT = "zero-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
VALUE = "value"
"""State name of frozen parameters, which have no master weight."""


def find(directory: Path, tag: str | None) -> Path:
    """The folder of checkpoint ``tag``, or of the newest one.

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
    """What the checkpoint in folder ``place`` holds.

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
    return dict(manifest)


@dataclass(frozen=True)
class _Place:
    segment: int
    start: int
    shard_numel: int


class Reader:
    """Reads ranges of parameters' states out of the slices that the writers' ranks left."""

    def __init__(self, place: Path, manifest: Mapping[str, Any]) -> None:
        """Read out of folder ``place``, laid out as `read_manifest` says."""
        self.folder = place
        self._files: dict[str, Any] = {}
        self._places = {
            name: _Place(index, start, segment["shard_numel"])
            for index, segment in enumerate(manifest["segments"])
            for name, start, _ in segment["slots"]
        }

    def read(self, state: str, param: str, start: int, stop: int) -> Tensor:
        """``[start, stop)`` of the flattened parameter's ``state``; 1-D, on the CPU."""
        place = self._places[param]
        low, high = place.start + start, place.start + stop
        parts = []
        while low < high:
            rank, offset = divmod(low, place.shard_numel)
            end = min(high, (rank + 1) * place.shard_numel)
            file = self.open(f"{state}-{rank:05d}.safetensors")
            parts.append(file.get_slice(str(place.segment))[offset : offset + end - low])
            low = end
        if not parts:  # of an empty parameter, its dtype is still that of the file
            parts.append(self.open(f"{state}-00000.safetensors").get_slice(str(place.segment))[:0])
        return torch.cat(parts)

    def open(self, name: str) -> Any:
        """The safetensors file ``name`` of the folder."""
        if name not in self._files:
            file = safe_open(self.folder / name, framework="pt")
            self._files[name] = file.__enter__()  # type: ignore[no-untyped-call]
        return self._files[name]

    def close(self) -> None:
        """Close what was opened."""
        for file in self._files.values():
            file.__exit__(None, None, None)
        self._files.clear()


@dataclass(frozen=True)
class Weight:
    """A parameter, as a checkpoint holds it.

    Attributes:
        names: its name and those tied to it.
        value: whole, on the CPU: unrounded if it is trained, else in its own dtype.
        dtype: of the parameter while it is computed.
        is_trainable: whether it is trained.
    """

    names: tuple[str, ...]
    value: Tensor
    dtype: torch.dtype
    is_trainable: bool


def read_weights(directory: Path, tag: str | None = None) -> Iterator[Weight]:
    """Every parameter of checkpoint ``tag``, or of the newest, one at a time; by one process alone.

    Values of frozen parameters are left out where the checkpoint was saved without them.

    Raises:
        CheckpointError: there is no such checkpoint.
        CheckpointCorruptError: it cannot be read.
    """
    place = find(directory, tag)
    manifest = read_manifest(place)
    with closing(Reader(place, manifest)) as reader:
        for spec in manifest["params"]:
            if not spec["is_trainable"] and not manifest.get("has_frozen", True):
                continue
            state = MASTER if spec["is_trainable"] else VALUE
            numel = torch.Size(spec["shape"]).numel()
            flat = reader.read(state, spec["name"], 0, numel)
            yield Weight(
                names=(spec["name"], *spec["aliases"]),
                value=flat.view(spec["shape"]),
                dtype=getattr(torch, spec["dtype"]),
                is_trainable=spec["is_trainable"],
            )


def read_buffers(directory: Path, tag: str | None = None) -> dict[str, Tensor]:
    """The persistent buffers of checkpoint ``tag``, or of the newest."""
    place = find(directory, tag)
    with closing(Reader(place, read_manifest(place))) as reader:
        file = reader.open("buffers.safetensors")
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
