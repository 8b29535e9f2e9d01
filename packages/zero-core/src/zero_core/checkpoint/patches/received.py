"""A patch as its receiver reads it: checked before anything is changed."""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor

from zero_core.checkpoint.patches.document import (
    CHECKSUM_KEY,
    METADATA_KEY,
    Document,
    PatchedTensor,
    Piece,
    Version,
    WeightPatch,
    crc_of,
)
from zero_core.checkpoint.safetensors_files import DTYPES, StoredTensor, first_error, read_open
from zero_core.checkpoint.storage import open_regular
from zero_core.errors import CheckpointCorruptError, CheckpointError, PatchGapError
from zero_core.sharded.changes.positions import Form, decode, from_low_bits

_ADVICE = "copy it again, or take all by engine.weight_patch(since=None)"


_Value = TypeVar("_Value", Tensor, StoredTensor)


class ReceivedPatch:
    """An open patch, described by ``document``."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self.name = name  # for messages
        self._file = file
        self._stored, metadata = read_open(file, Path(name))
        text = metadata.get(METADATA_KEY)
        if text is None:
            raise CheckpointError(f"{name} is no patch: engine.weight_patch() writes them")
        if metadata.get(CHECKSUM_KEY) != str(zlib.crc32(text.encode())):
            raise CheckpointCorruptError(f"{name}: its description is damaged; {_ADVICE}")
        try:
            self.document = Document.model_validate_json(text)
        except ValidationError as error:
            raise CheckpointError(
                f"{name} is a patch of another format: {first_error(error)}; use one release of "
                "zero-core on both sides"
            ) from error

    def check(self) -> None:
        """Check all checksums, positions and lengths."""
        for tensor in self.document.tensors:
            with self._named(tensor):
                if tensor.order and sorted(tensor.order) != list(range(len(tensor.shape))):
                    raise ValueError(f"order {tensor.order} of shape {tensor.shape}")
            for piece in tensor.pieces:
                with self._named(tensor):
                    self._content(tensor, piece)

    def apply(self, tensor: PatchedTensor, values: Tensor, *, is_trial: bool = False) -> None:
        """Write the changes of ``tensor`` to ``values``, flattened, or check it if ``is_trial``."""
        for piece in tensor.pieces:
            with self._named(tensor):
                index, sent = self._content(tensor, piece)
            part = values[piece.start : piece.start + piece.numel]
            place = index.to(values.device) if isinstance(index, Tensor) else index
            new = sent
            if piece.form is not Form.VALUES:
                new = from_low_bits(part[place].cpu(), sent, piece.form)
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
        version = given
        if version is None:
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
            version = known.version
        if version < document.since:
            raise PatchGapError(
                f"{what} has version {version}, and the patch applies to {document.since} and "
                f"newer ones: ask the engine for weight_patch(since={version}), or for all by "
                "since=None"
            )
        if version > document.version:
            raise CheckpointError(
                f"{what} has version {version}, which is newer than that of the patch, "
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
        """Return the positions in a piece, and what was sent of their values."""
        keys = f"{piece.number}.positions", f"{piece.number}.values"
        positions, sent = (
            stored.read_from(self._file)
            for stored in (self._stored[keys[0]], self._stored[keys[1]])
        )
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
        return index, sent

    @contextmanager
    def _named(self, tensor: PatchedTensor) -> Iterator[None]:
        try:
            yield
        except (ValueError, KeyError) as error:
            raise CheckpointCorruptError(
                f"{self.name} is damaged: {tensor.names[0]}: {error}; {_ADVICE}"
            ) from error


@contextmanager
def open_patch(patch: WeightPatch | bytes | str | Path) -> Iterator[ReceivedPatch]:
    """Open a patch and check it."""
    source = patch.source if isinstance(patch, WeightPatch) else patch
    if source is None:
        raise ValueError("the patch is on rank 0: apply it there, or send its bytes or file")
    name = "the patch" if isinstance(source, bytes) else str(source)
    with io.BytesIO(source) if isinstance(source, bytes) else open_regular(Path(source)) as file:
        received = ReceivedPatch(file, name)
        received.check()
        yield received
