"""Format of a patch: a safetensors file whose metadata describes its tensors.

[Note: the file]
The metadata has two strings: ``zero_patch``, a `Document` as JSON, and ``crc32``, that of the
former. A parameter, or a buffer, that changed is a `PatchedTensor`. Its pieces are ranges of its
flattened elements: those that one rank held. A piece has two tensors, named by its number:
``NUMBER.positions``, uint8, which positions in the piece have changed; and ``NUMBER.values``, their
new values in the order of the positions, or the lowest bits of these: see
`zero_core.sharded.changes.positions`. Its crc32 is that of both as they were written, and of the
new values: so a receiver whose values are others than those of its version is found out.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from zero_core.checkpoint.safetensors_files import bytes_of
from zero_core.sharded.changes.positions import Form, Kind

METADATA_KEY = "zero_patch"
CHECKSUM_KEY = "crc32"

_Count = Annotated[int, Field(ge=0)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Piece(NamedTuple):
    """Changes in a range of a tensor's flattened elements."""

    number: _Count  # of the piece
    start: _Count  # first element of the range
    numel: _Count  # elements of the range
    kind: Kind  # encoding of the positions
    form: Form  # what there is of the values
    data_crc: int  # crc32 of the tensor of values, after that of positions
    result_crc: int  # crc32 of the new values


class PatchedTensor(_Part):
    """A parameter or buffer with changes."""

    names: Annotated[tuple[str, ...], Field(min_length=1)]  # several, if it is tied
    shape: tuple[_Count, ...]  # of the whole
    dtype: str  # as in safetensors
    pieces: tuple[Piece, ...]  # in the order of their starts
    order: tuple[_Count, ...] = ()  # of dimensions, the slowest first; () for the shape's


class Document(_Part):
    """Description of a patch."""

    format: Literal[1] = 1  # of the file
    engine: str  # the engine that wrote it: versions of two engines have nothing in common
    since: _Count | None  # the oldest version that it applies to. None: any values
    version: _Count  # of a receiver afterwards
    tensors: tuple[PatchedTensor, ...]  # the changed ones


class Version(_Part):
    """Version ``version`` of the engine ``engine``, as a receiver keeps it."""

    engine: str
    version: int


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


def crc_of(*tensors: Tensor) -> int:
    """Return the crc32 of the bytes of tensors, one after another."""
    crc = 0
    for tensor in tensors:
        data = tensor.cpu().contiguous()  # alive while its bytes are read
        crc = zlib.crc32(bytes_of(data), crc)
    return crc
