"""Safetensors files of a whole model in Hugging Face's layout, written one tensor at a time.

A file's header, which has the place of every tensor, stands before the tensors. So bytes are
appended to a file without a header first, and copied behind the header once a file is full. Memory
holds one tensor, however large the files are.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from zero_core._torch import inner_tensors
from zero_core.checkpoint.safetensors_files import INDEX, bytes_of, dtype_name, make_header
from zero_core.checkpoint.storage.disk import no_room, write_all
from zero_core.errors import CheckpointError

MAX_FILE_BYTES = 5 * 1000**3
_COPIED_BYTES = 16 * 1024**2  # at a time


@dataclass(frozen=True)
class _Written:
    """A tensor in the file without a header, from byte ``start`` on."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


class TensorBuffer:
    """Tensors of a file to be, whose bytes wait in ``raw``, an open file.

    Attributes:
        nbytes: bytes so far.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        self.nbytes = 0
        self._raw = raw
        self._written: list[_Written] = []

    def add(self, name: str, value: Tensor) -> None:
        """Append ``value``, of any device and strides.

        Raises:
            OSError: there is no room.
        """
        data = value.cpu().contiguous()  # alive while its bytes are written
        write_all(self._raw, bytes_of(data))
        shape = tuple(value.shape)
        self._written.append(_Written(name, value.dtype, shape, self.nbytes, value.nbytes))
        self.nbytes += value.nbytes

    def write_to(self, file: IO[bytes], metadata: dict[str, str]) -> dict[str, int]:
        """Write a safetensors file to ``file``. Return the bytes of each tensor by name.

        Raises:
            OSError: there is no room.
        """
        # The order of the safetensors library: every tensor is aligned to its elements.
        ordered = sorted(self._written, key=lambda written: (-written.dtype.itemsize, written.name))
        file.write(make_header(((w.name, w.dtype, w.shape) for w in ordered), metadata))
        for written in ordered:
            _copy(self._raw, file, written)
        return {written.name: written.nbytes for written in self._written}


class ModelFiles:
    """Writer of ``model.safetensors``, or of several files of `MAX_FILE_BYTES` and an index.

    Call `add` for each tensor and then `finish`; `discard` after an error. Nothing stands under the
    final names until `finish`.
    """

    def __init__(self, directory: Path) -> None:
        """Use ``directory``, which is made if it does not exist."""
        self._directory = directory
        self._raw = directory / "part-data.tmp"
        self._file: IO[bytes] | None = None  # that at `_raw`
        self._pending: TensorBuffer | None = None  # in that file
        self._parts: list[dict[str, int]] = []  # bytes by tensor name

    def add(self, name: str, value: Tensor) -> None:
        """Append ``value``, of any device and strides.

        Raises:
            CheckpointError: it is a tensor subclass, of a dtype that safetensors lacks, or there is
                no room.
        """
        if inner_tensors(value) is not None:
            raise CheckpointError(
                f"{name} is a {type(value).__name__}, a tensor subclass, which safetensors "
                "cannot hold: keep a training by save_checkpoint(), take the state dict from "
                "full_state_dict(), or merge adapters and export the dequantized weights"
            )
        dtype_name(value.dtype, name)  # refuses what the format lacks
        if self._pending is not None and self._pending.nbytes + value.nbytes > MAX_FILE_BYTES:
            self._close_part()
        try:
            self._buffer().add(name, value)
        except OSError as error:
            raise no_room(_part(self._directory, len(self._parts)), error) from error

    def finish(self) -> None:
        """Write what is left, give the files their names, and write the index."""
        if self._pending is not None or not self._parts:
            self._close_part()
        _name_files(self._directory, self._parts)

    def discard(self) -> None:
        """Delete what was written."""
        if self._file is not None:
            self._file.close()
            self._file = None
        for part in self._directory.glob("part-*.tmp"):
            part.unlink()

    def _buffer(self) -> TensorBuffer:
        if self._pending is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._file = self._raw.open("w+b", buffering=0)
            self._pending = TensorBuffer(self._file)
        return self._pending

    def _close_part(self) -> None:
        """Write the header of the current file and copy its tensors behind it."""
        path = _part(self._directory, len(self._parts))
        try:
            pending = self._buffer()
            with path.open("wb") as file:
                self._parts.append(pending.write_to(file, {"format": "pt"}))
        except OSError as error:
            raise no_room(path, error) from error
        assert self._file is not None, "the buffer is in it"
        self._file.close()
        self._raw.unlink()
        self._file = self._pending = None


def _copy(source: IO[bytes], target: IO[bytes], written: _Written) -> None:
    source.seek(written.start)
    left = written.nbytes
    while left:
        data = source.read(min(left, _COPIED_BYTES))
        if not data:
            raise OSError(f"{written.name} ends after {written.nbytes - left} bytes")
        target.write(data)
        left -= len(data)


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
