"""A patch as its receiver reads it: checked before anything is changed."""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch
from pydantic import ValidationError
from torch import Tensor

from zero_core.checkpoint.patches.document import (
    CHECKSUM_KEY,
    METADATA_KEY,
    Document,
    PatchedTensor,
    Piece,
    WeightPatch,
    crc_of,
    positions_key,
    values_key,
)
from zero_core.checkpoint.safetensors_files import (
    DTYPES,
    StoredTensor,
    first_error,
    read_open,
)
from zero_core.checkpoint.storage.disk import open_regular
from zero_core.errors import CheckpointCorruptError, CheckpointError
from zero_core.sharded.changes.positions import decode

_ADVICE = "copy it again, or take all by engine.weight_patch(since=None)"


class ReceivedPatch:
    """An open patch.

    Attributes:
        document: its description.
        name: for messages.
    """

    def __init__(self, file: IO[bytes], name: str) -> None:
        """Read the description.

        Raises:
            CheckpointError: it is another safetensors file, or of a later format.
            CheckpointCorruptError: it is not whole.
        """
        self.name = name
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
        """Check all checksums, positions and lengths.

        Raises:
            CheckpointCorruptError: something is not as it was written.
        """
        for key in self._stored:
            if self.document.crcs.get(key) != crc_of(self._read(key)):
                raise CheckpointCorruptError(f"{self.name}: {key} is damaged; {_ADVICE}")
        for tensor in self.document.tensors:
            for _ in self.changes(tensor):
                pass

    def changes(self, tensor: PatchedTensor) -> Iterator[tuple[Tensor | slice, Tensor]]:
        """Yield index into the flattened tensor and new values, of each piece."""
        numel = math.prod(tensor.shape)
        for piece in tensor.pieces:
            try:
                if piece.start + piece.numel > numel:
                    raise ValueError(f"{piece.numel} elements from {piece.start} on, of {numel}")
                yield self._change(tensor, piece)
            except (ValueError, KeyError) as error:
                raise CheckpointCorruptError(
                    f"{self.name}: {tensor.names[0]}: {error}; {_ADVICE}"
                ) from error

    def _change(self, tensor: PatchedTensor, piece: Piece) -> tuple[Tensor | slice, Tensor]:
        name = tensor.names[0]
        values = self._read(values_key(name, piece.start))
        index = decode(piece.kind, self._read(positions_key(name, piece.start)), piece.numel)
        count = index.numel() if isinstance(index, Tensor) else piece.numel
        if not count == piece.count == values.numel() or values.dtype != DTYPES[tensor.dtype]:
            raise ValueError(f"{values.numel()} values, {values.dtype}, for {count} positions")
        if isinstance(index, Tensor):
            return index + piece.start, values
        return slice(piece.start, piece.start + piece.numel), values

    def _read(self, key: str) -> Tensor:
        stored: StoredTensor = self._stored[key]
        data = bytearray(math.prod(stored.shape) * stored.dtype.itemsize)
        if not data:
            return torch.empty(0, dtype=stored.dtype)
        self._file.seek(stored.start)
        left = memoryview(data)
        while left.nbytes:
            count = self._file.readinto(left)  # type: ignore[attr-defined]
            if not count:
                raise CheckpointCorruptError(f"{self.name} ends within {key}; {_ADVICE}")
            left = left[count:]
        return torch.frombuffer(data, dtype=stored.dtype)


@contextmanager
def open_patch(patch: WeightPatch | bytes | str | Path) -> Iterator[ReceivedPatch]:
    """Open a patch and check it.

    Raises:
        ValueError: a `WeightPatch` of another rank than 0.
        CheckpointError: it is none.
        CheckpointCorruptError: it is damaged.
    """
    source = patch.source if isinstance(patch, WeightPatch) else patch
    if source is None:
        raise ValueError("the patch is on rank 0: apply it there, or send its bytes or file")
    is_here = isinstance(source, bytes)
    name = "the patch" if is_here else str(source)
    with io.BytesIO(source) if isinstance(source, bytes) else open_regular(Path(source)) as file:
        received = ReceivedPatch(file, name)
        received.check()
        yield received
