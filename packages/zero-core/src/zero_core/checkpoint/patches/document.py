"""Format of a patch: a safetensors file whose metadata describes its tensors.

[Note: the file]
The metadata has two strings: ``zero_patch``, a `Document` as JSON, and ``crc32``, that of the
former. A parameter, or a buffer, that changed is a `PatchedTensor`. Its pieces are ranges of its
flattened elements: those that one rank held. A piece has two tensors: ``NAME:START:positions``,
uint8, which positions in the piece have changed (`zero_core.sharded.changes.positions`); and
``NAME:START:values``, their values, in the order of the positions. Each has its crc32.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from zero_core.checkpoint.safetensors_files import bytes_of
from zero_core.sharded.changes.positions import Kind

METADATA_KEY = "zero_patch"
CHECKSUM_KEY = "crc32"

_Count = Annotated[int, Field(ge=0)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Piece(_Part):
    """Changes in ``[start, start + numel)`` of a tensor's flattened elements: ``count`` of them."""

    start: _Count
    numel: _Count
    kind: Kind
    count: _Count


class PatchedTensor(_Part):
    """A parameter or buffer with changes.

    Attributes:
        names: in the model's state dict: several, if it is tied. The first names its tensors.
        shape: of the whole.
        dtype: as in safetensors.
        pieces: in the order of their starts.
    """

    names: Annotated[tuple[str, ...], Field(min_length=1)]
    shape: tuple[_Count, ...]
    dtype: str
    pieces: tuple[Piece, ...]


class Document(_Part):
    """Description of a patch.

    Attributes:
        format: of the file.
        engine: the engine that wrote it: versions of two engines have nothing in common.
        since: the oldest version that it applies to. None: to any values, as it has all.
        version: of a receiver afterwards.
        tensors: the changed ones.
        crcs: by the name of a tensor in the file.
    """

    format: Literal[1] = 1
    engine: str
    since: _Count | None
    version: _Count
    tensors: tuple[PatchedTensor, ...]
    crcs: dict[str, int]


@dataclass(frozen=True)
class WeightPatch:
    """A patch of the weights.

    Attributes:
        since: the oldest version that it applies to. None: to any values, as it has all.
        version: of a receiver afterwards: ``since`` of its next patch.
        nbytes: bytes of the file. 0 on ranks other than 0.
        source: the file, or its bytes. None on ranks other than 0.
    """

    since: int | None
    version: int
    nbytes: int
    source: Path | bytes | None


def positions_key(name: str, start: int) -> str:
    """Return the name of a piece's positions in the file."""
    return f"{name}:{start}:positions"


def values_key(name: str, start: int) -> str:
    """Return the name of a piece's values in the file."""
    return f"{name}:{start}:values"


def crc_of(values: Tensor) -> int:
    """Return the crc32 of a tensor's bytes."""
    data = values.contiguous()  # alive while its bytes are read
    return zlib.crc32(bytes_of(data))


def to_metadata(document: Document) -> dict[str, str]:
    """Return the metadata of a patch's file."""
    text = document.model_dump_json()
    return {METADATA_KEY: text, CHECKSUM_KEY: str(zlib.crc32(text.encode()))}
