"""safetensors of other programs: index of their tensors, and reads of ranges.

Ranges are read from the file, not mapped. Pages of a mapping stay with the process, and a rank's
memory would hold its part twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zero_core.errors import CheckpointCorruptError, CheckpointError

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "C64": torch.complex64,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """Tensor in a file, whose elements are contiguous from byte ``start``."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    def read(self, first: int, last: int) -> Tensor:
        """Return elements ``[first, last)`` of the flattened tensor, 1-D, in the file's dtype, CPU.

        Raises:
            CheckpointCorruptError: the file is shorter than it was.
        """
        if first == last:
            return torch.empty(0, dtype=self.dtype)
        data = bytearray((last - first) * self.dtype.itemsize)
        with self.path.open("rb") as file:
            file.seek(self.start + first * self.dtype.itemsize)
            if file.readinto(data) != len(data):
                raise CheckpointCorruptError(f"{self.path} ends within a tensor")
        return torch.frombuffer(data, dtype=self.dtype)

    def value(self) -> Tensor:
        """Return the whole tensor, as `read` does."""
        return self.read(0, math.prod(self.shape)).view(self.shape)


def find_tensors(source: str | Path | Sequence[str | Path]) -> dict[str, StoredTensor]:
    """Return the tensors by name of a file, several files, or a Hugging Face folder.

    Raises:
        CheckpointError: there is no such file, or a tensor is in two of them.
        CheckpointCorruptError: a file is not whole.
    """
    found: dict[str, StoredTensor] = {}
    for path in _files(source):
        for name, tensor in read_header(path).items():
            if name in found:
                raise CheckpointError(
                    f"tensor {name} is in {found[name].path} and in {path}: name one of them"
                )
            found[name] = tensor
    return found


def _files(source: str | Path | Sequence[str | Path]) -> list[Path]:
    if not isinstance(source, str | Path):
        return [Path(path) for path in source]
    path = Path(source)
    if path.is_dir():
        if (path / _SINGLE).is_file():  # the one that other readers prefer
            return [path / _SINGLE]
        if not (path / INDEX).is_file():
            there = sorted(p.name for p in path.iterdir() if "model" in p.name)[:5]
            raise CheckpointError(
                f"{path} holds neither {_SINGLE} nor {INDEX}, but {there}: weights in another "
                "format must be saved as safetensors first"
            )
        path = path / INDEX
    return _files_of_index(path) if path.name.endswith(".index.json") else [path]


def _files_of_index(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorruptError(f"{index} has no weight_map: {error!r}") from error
    if any(Path(name).name != name for name in names):
        raise CheckpointCorruptError(f"{index} names files outside its folder: {names[:3]}")
    return [index.parent / name for name in names]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors by name of one file.

    Raises:
        CheckpointError: there is no such file.
        CheckpointCorruptError: it is not whole.
    """
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}")
    try:
        with safe_open(path, framework="pt"):
            pass  # it checks that shapes, dtypes, offsets and the file's length fit together
    except SafetensorError as error:
        raise CheckpointCorruptError(
            f"{path} is not a whole safetensors file: {error}; copy or download it again"
        ) from error
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    found = {}
    for name, facts in header.items():
        if name == "__metadata__":
            continue
        if facts["dtype"] not in DTYPES:
            raise CheckpointError(
                f"{path}: tensor {name} has dtype {facts['dtype']}, not read here"
            )
        start = 8 + length + facts["data_offsets"][0]
        found[name] = StoredTensor(path, DTYPES[facts["dtype"]], tuple(facts["shape"]), start)
    return found
