"""Safetensors files of a whole model in Hugging Face's layout, written one tensor at a time.

A file's header, which has the place of every tensor, stands before the tensors. So bytes are
appended to a file without a header first, and copied behind the header once a file is full. Memory
holds one tensor, however large the files are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from zero_core._torch import inner_tensors
from zero_core.checkpoint.safetensors_files import INDEX, bytes_of, dtype_name, make_header
from zero_core.checkpoint.storage.local import no_room, write_all
from zero_core.errors import CheckpointError

MAX_FILE_BYTES = 5 * 1000**3
_COPIED_BYTES = 16 * 1024**2  # at a time


class TensorBuffer:
    """Tensors of a file to be, whose bytes wait in an open file without a header."""

    def __init__(self, raw: IO[bytes]) -> None:
        self.raw = raw  # the open file
        self.nbytes = 0  # bytes so far
        self._written: list[tuple[str, torch.dtype, tuple[int, ...], int, int]] = []

    def add(self, name: str, value: Tensor) -> None:
        """Append ``value``, of any device and strides."""
        data = value.cpu().contiguous()  # alive while its bytes are written
        write_all(self.raw, bytes_of(data))
        shape = tuple(value.shape)
        self._written.append((name, value.dtype, shape, self.nbytes, value.nbytes))
        self.nbytes += value.nbytes

    def write_to(self, file: IO[bytes], metadata: dict[str, str]) -> dict[str, int]:
        """Write a safetensors file to ``file``. Return the bytes of each tensor by name."""
        # The order of the safetensors library: every tensor is aligned to its elements.
        ordered = sorted(self._written, key=lambda written: (-written[1].itemsize, written[0]))
        file.write(make_header((written[:3] for written in ordered), metadata))
        for name, _, _, start, left in ordered:
            self.raw.seek(start)
            while left:
                data = self.raw.read(min(left, _COPIED_BYTES))
                if not data:
                    raise OSError(f"{name} ends {left} bytes too early")
                file.write(data)
                left -= len(data)
        return {name: nbytes for name, _, _, _, nbytes in self._written}


class ModelFiles:
    """Writer of ``model.safetensors``, or of several files of `MAX_FILE_BYTES` and an index.

    Call `add` for each tensor and then `finish`; `discard` after an error. Nothing stands under the
    final names until `finish`: files are ``part-NUMBER.tmp`` as long as their number is not known.
    """

    def __init__(self, directory: Path) -> None:
        """Use ``directory``, which is made if it does not exist."""
        self._directory = directory
        self._pending: TensorBuffer | None = None  # in part-data.tmp
        self._parts: list[dict[str, int]] = []  # bytes by tensor name

    def add(self, name: str, value: Tensor) -> None:
        """Append ``value``, of any device and strides."""
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
            self._open_part().add(name, value)
        except OSError as error:
            raise no_room(self._part(len(self._parts)), error) from error

    def finish(self) -> None:
        """Write what is left, give the files their names, and write the index."""
        if self._pending is not None or not self._parts:
            self._close_part()
        # An earlier export of another size must not stand beside this one: readers take the first.
        for old in (*self._directory.glob("model*.safetensors"), self._directory / INDEX):
            old.unlink(missing_ok=True)
        count = len(self._parts)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        if count == 1:
            names = ["model.safetensors"]
        for number, name in enumerate(names):
            self._part(number).replace(self._directory / name)
        if count == 1:
            return
        index = {
            "metadata": {"total_size": sum(sum(part.values()) for part in self._parts)},
            "weight_map": {t: n for n, f in zip(names, self._parts, strict=True) for t in f},
        }
        (self._directory / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")

    def discard(self) -> None:
        if self._pending is not None:
            self._pending.raw.close()
            self._pending = None
        for part in self._directory.glob("part-*.tmp"):
            part.unlink()

    def _part(self, number: int) -> Path:
        return self._directory / f"part-{number}.tmp"

    def _open_part(self) -> TensorBuffer:
        if self._pending is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            raw = (self._directory / "part-data.tmp").open("w+b", buffering=0)
            self._pending = TensorBuffer(raw)
        return self._pending

    def _close_part(self) -> None:
        """Write the header of the current file and copy its tensors behind it."""
        path = self._part(len(self._parts))
        try:
            pending = self._open_part()
            with path.open("wb") as file:
                self._parts.append(pending.write_to(file, {"format": "pt"}))
        except OSError as error:
            raise no_room(path, error) from error
        pending.raw.close()
        (self._directory / "part-data.tmp").unlink()
        self._pending = None
