"""Format of a patch, a safetensors file whose metadata describes its tensors, and its reader.

[Note: the file]
The metadata has two strings: ``zero_patch``, a `Document` as JSON, and ``crc32``, that of the
former. A parameter, or a buffer, that changed is a `PatchedTensor`. Its pieces are ranges of its
flattened elements: those that one rank held. A piece has two tensors, named by its number:
``NUMBER.positions``, uint8, which positions in the piece have changed; and ``NUMBER.values``, their
new values in the order of the positions, or the lowest bits of these: see
`zero_core.sharded.changes`. Its crc32 is that of both as they were written, and of the
new values: so a receiver whose values are others than those of its version is found out.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Literal, NamedTuple, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from zero_core.checkpoint.safetensors_files import (
    DTYPES,
    StoredTensor,
    bytes_of,
    first_error,
    read_open,
)
from zero_core.errors import CheckpointCorruptError, CheckpointError, PatchGapError
from zero_core.sharded.changes import Form, Kind, decode, from_low_bits

_METADATA_KEY = "zero_patch"
_CHECKSUM_KEY = "crc32"
_ADVICE = "copy it again, or take all by engine.weight_patch(since=None)"
_Value = TypeVar("_Value", Tensor, StoredTensor)

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

    def to_metadata(self) -> dict[str, str]:
        text = self.model_dump_json()
        return {_METADATA_KEY: text, _CHECKSUM_KEY: str(zlib.crc32(text.encode()))}


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


class ReceivedPatch:
    """An open patch, described by ``document``. A receiver has ``version`` afterwards."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self.name = name  # for messages
        self._file = file
        self._stored, metadata = read_open(file, Path(name))
        text = metadata.get(_METADATA_KEY)
        if text is None:
            raise CheckpointError(f"{name} is no patch: engine.weight_patch() writes them")
        if metadata.get(_CHECKSUM_KEY) != str(zlib.crc32(text.encode())):
            raise CheckpointCorruptError(f"{name}: its description is damaged; {_ADVICE}")
        try:
            self.document = Document.model_validate_json(text)
        except ValidationError as error:
            raise CheckpointError(
                f"{name} is a patch of another format: {first_error(error)}; use one release of "
                "zero-core on both sides"
            ) from error
        self.version = Version(engine=self.document.engine, version=self.document.version)
        for tensor in self.document.tensors:
            if tensor.order and sorted(tensor.order) != list(range(len(tensor.shape))):
                raise self._damaged(tensor, f"order {tensor.order} of shape {tensor.shape}")
            for piece in tensor.pieces:
                self._content(tensor, piece)

    def apply(self, tensor: PatchedTensor, values: Tensor, *, is_trial: bool = False) -> None:
        """Write the changes of ``tensor`` to ``values``, flattened, or check it if ``is_trial``."""
        for piece in tensor.pieces:
            index, new = self._content(tensor, piece)
            part = values[piece.start : piece.start + piece.numel]
            place = index.to(values.device) if isinstance(index, Tensor) else index
            if piece.form is not Form.VALUES:
                new = from_low_bits(part[place].cpu(), new, piece.form)
            if crc_of(new) != piece.result_crc:
                raise CheckpointError(
                    f"{self.name}: {tensor.names[0]} has not the values of the version that it is "
                    "taken for: something else has changed it; apply a patch of all values "
                    "(since=None)"
                )
            if not is_trial:
                part[place] = new.to(values.device)

    def check_version(self, known: Version | None, given: int | None, what: str) -> None:
        """Refuse a receiver ``what`` of a wrong version: ``known`` from it, or ``given``."""
        document = self.document
        if document.since is None:
            return
        if given is None:
            if known is None:
                raise CheckpointError(
                    f"the patch applies to version {document.since} and newer ones, and that of "
                    f"{what} is not known: apply a patch of all values first (since=None), or pass "
                    "version="
                )
            if known.engine != document.engine:
                raise CheckpointError(
                    f"{what} has version {known.version} of another engine than the patch: after "
                    "a new build(), apply a patch of all values first (since=None)"
                )
            given = known.version
        if given < document.since:
            raise PatchGapError(
                f"{what} has version {given}, and the patch applies to {document.since} and "
                f"newer ones: ask the engine for weight_patch(since={given}), or for all by "
                "since=None"
            )
        if given > document.version:
            raise CheckpointError(
                f"{what} has version {given}, which is newer than that of the patch, "
                f"{document.version}: apply patches in their order"
            )

    def match(
        self, there: Sequence[tuple[str, _Value]], required: Mapping[str, _Value], what: str
    ) -> list[tuple[str, PatchedTensor, _Value]]:
        """Return what the tensors are written to. A patch of all must have those ``required``."""
        by_name = {name: tensor for tensor in self.document.tensors for name in tensor.names}
        found = [(name, by_name[name], value) for name, value in there if name in by_name]
        known = {tensor.names for _, tensor, _ in found}
        for tensor in self.document.tensors:
            if tensor.names not in known:
                raise CheckpointError(
                    f"the patch changes {tensor.names[0]}, which {what} lacks: it has "
                    f"{', '.join(sorted(name for name, _ in there)[:4])}, ...; use the model of "
                    "the training, or an export of it"
                )
        for name, tensor, value in found:
            if tuple(value.shape) != tensor.shape or value.dtype != DTYPES[tensor.dtype]:
                raise CheckpointError(
                    f"{name} is {tuple(value.shape)} in {value.dtype} in {what}, and "
                    f"{tensor.shape} in {DTYPES[tensor.dtype]} in the patch: use the training's "
                    "model, or an export of it, in its compute dtype"
                )
        given = {id(value) for _, _, value in found}
        lacking = [
            n for n, v in required.items() if id(v) not in given and v.dtype.is_floating_point
        ]
        if self.document.since is None and lacking:
            raise CheckpointError(
                f"the patch has all values of the training's model, and none for {lacking[:4]} in "
                f"{what}: use the model of the training"
            )
        return found

    def _content(self, tensor: PatchedTensor, piece: Piece) -> tuple[Tensor | slice, Tensor]:
        """Return the positions in a piece, and what was sent of their values. Both are checked."""
        try:
            found = [self._stored[f"{piece.number}.{part}"] for part in ("positions", "values")]
            positions, sent = (one.read_from(self._file) for one in found)
            if crc_of(positions, sent) != piece.data_crc:
                raise ValueError("its checksum is wrong")
            if piece.start + piece.numel > math.prod(tensor.shape):
                raise ValueError(f"{piece.numel} elements from {piece.start} on")
            index = decode(piece.kind, positions, piece.numel)
            count = index.numel() if isinstance(index, Tensor) else piece.numel
            num_sent, dtype = count, DTYPES[tensor.dtype]
            if piece.form is not Form.VALUES:
                num_sent, dtype = -(-count * piece.form.num_bits // 8), torch.uint8
            if sent.numel() != num_sent or sent.dtype != dtype:
                raise ValueError(f"{sent.numel()} values, {sent.dtype}, for {count} positions")
        except (ValueError, KeyError) as error:
            raise self._damaged(tensor, error) from error
        return index, sent

    def _damaged(self, tensor: PatchedTensor, reason: object) -> CheckpointCorruptError:
        return CheckpointCorruptError(
            f"{self.name} is damaged: {tensor.names[0]}: {reason}; {_ADVICE}"
        )
