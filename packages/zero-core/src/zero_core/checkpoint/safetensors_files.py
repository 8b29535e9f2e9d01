"""safetensors files: index of their tensors, reads of ranges, and the header of new ones.

Ranges are read from the file, not mapped. Pages of a mapping stay with the process, and a rank's
memory would hold its part twice. A header is checked against the file's size before anything is
allocated, as the safetensors library does, but of an open file: a path may be a pipe.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from zero_core.checkpoint.storage.location import Location, open_regular, size_of
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
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
_MAX_INDEX_BYTES = 100_000_000
_MAX_DIMS = 64  # of a tensor of torch

_Count = Annotated[int, Field(ge=0)]


class _Entry(BaseModel):
    """A tensor in a header."""

    model_config = ConfigDict(strict=True, extra="forbid")

    dtype: str
    shape: Annotated[tuple[_Count, ...], Field(max_length=_MAX_DIMS)]
    data_offsets: tuple[_Count, _Count]


class _Index(BaseModel):
    """The index of a model in several files."""

    weight_map: dict[str, str]


class _Header(BaseModel):
    """A header: entries by the tensors' names, and strings of the writer's."""

    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, _Entry]

    metadata: dict[str, str] = Field(default={}, alias="__metadata__")


@dataclass(frozen=True)
class StoredTensor:
    """Tensor in a file, contiguous from byte ``start``. `open_regular` has ``follows_links``."""

    path: Location
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    follows_links: bool = True

    def read(self, first: int, last: int) -> Tensor:
        """Return elements ``[first, last)`` of the flattened tensor, 1-D, as stored, on the CPU."""
        if not 0 <= first <= last <= math.prod(self.shape):
            raise CheckpointCorruptError(
                f"{self.path} has {math.prod(self.shape)} elements where {first} to {last} are read"
            )
        with open_regular(self.path, follows_links=self.follows_links) as file:
            return self.read_from(file, first, last)

    def read_from(self, file: IO[bytes], first: int, last: int) -> Tensor:
        """Return what `read` does, of the open ``file``."""
        if first == last:
            return torch.empty(0, dtype=self.dtype)
        data = bytearray((last - first) * self.dtype.itemsize)
        left = memoryview(data)
        file.seek(self.start + first * self.dtype.itemsize)
        while left.nbytes:
            count = file.readinto(left)  # type: ignore[attr-defined]
            if not count:
                raise CheckpointCorruptError(f"{self.path} ends within a tensor")
            left = left[count:]
        return torch.frombuffer(data, dtype=self.dtype)

    def value(self) -> Tensor:
        return self.read(0, math.prod(self.shape)).view(self.shape)


def find_tensors(source: str | Path | Sequence[str | Path]) -> dict[str, StoredTensor]:
    """Return the tensors by name of a file, several files, or a Hugging Face folder."""
    found: dict[str, StoredTensor] = {}
    for path in model_files(source):
        for name, tensor in read_header(path).items():
            if name in found:
                raise CheckpointError(
                    f"tensor {name} is in {found[name].path} and in {path}: name one of them"
                )
            found[name] = tensor
    return found


def model_files(source: str | Path | Sequence[str | Path]) -> list[Path]:
    """Return the files of a model: of a file, several files, or a Hugging Face folder."""
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
    if not path.name.endswith(".index.json"):
        return [path]
    with open_regular(path) as file:
        data = file.read(_MAX_INDEX_BYTES)
    try:
        names = sorted(set(_Index.model_validate_json(data).weight_map.values()))
    except ValidationError as error:
        raise CheckpointCorruptError(f"{path} has no weight_map: {first_error(error)}") from error
    if any(Path(name).name != name for name in names):
        raise CheckpointCorruptError(f"{path} names files outside its folder: {names[:3]}")
    return [path.parent / name for name in names]


def read_header(path: Location, *, follows_links: bool = True) -> dict[str, StoredTensor]:
    """Return the tensors by name of one file. For ``follows_links`` see `open_regular`."""
    with open_regular(path, follows_links=follows_links) as file:
        return read_open(file, path, follows_links=follows_links)[0]


def read_open(
    file: IO[bytes], path: Location, *, follows_links: bool = True
) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the tensors of an open file, and the strings of its writer. ``path``: for messages."""
    found, size = {}, size_of(file)
    try:
        stop = length = 8 + int.from_bytes(file.read(8), "little")
        if length > min(size, _MAX_HEADER_BYTES):
            raise ValueError(f"it has {size} bytes, and a header of {length}")
        header = _Header.model_validate_json(file.read(length - 8))
        # The tensors follow one another up to the file's end.
        entries = header.__pydantic_extra__.items()
        for name, entry in sorted(entries, key=lambda item: item[1].data_offsets):
            if entry.dtype not in DTYPES:
                raise CheckpointError(
                    f"{path}: tensor {name} has dtype {entry.dtype}, not read here"
                )
            dtype, (low, high) = DTYPES[entry.dtype], entry.data_offsets
            numel = math.prod(entry.shape)
            if length + low != stop or high - low != numel * dtype.itemsize:
                raise ValueError(
                    f"{name}, {entry.dtype} {entry.shape}, has the bytes {low} to {high}"
                )
            found[name] = StoredTensor(path, dtype, entry.shape, stop, follows_links)
            stop = length + high
        if stop != size:
            raise ValueError(f"it has {size} bytes, and its tensors end at {stop}")
    except (ValidationError, ValueError) as error:
        reason = first_error(error) if isinstance(error, ValidationError) else error
        raise CheckpointCorruptError(
            f"{path} is not a whole safetensors file: {reason}; copy or download it again"
        ) from error
    return found, header.metadata


def first_error(error: ValidationError) -> str:
    """Return place and reason of the first of a ValidationError's errors."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))[:200]
    return f"{place}: {first['msg']}" if place else first["msg"]


def dtype_name(dtype: torch.dtype, name: str) -> str:
    if dtype not in _NAMES:
        raise CheckpointError(f"{name} is {dtype}, which safetensors cannot hold")
    return _NAMES[dtype]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, which must outlive the result."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


def make_header(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: dict[str, str]
) -> bytes:
    """Return the header of a file with these tensors in order, padded to whole elements."""
    facts: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    stop = 0
    for name, dtype, shape in tensors:
        start, stop = stop, stop + math.prod(shape) * dtype.itemsize
        facts[name] = {
            "dtype": dtype_name(dtype, name),
            "shape": tuple(shape),
            "data_offsets": (start, stop),
        }
    text = json.dumps(facts, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class Blocks(Protocol):
    """A 1-D tensor whose parts are made when they are reached, once."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __iter__(self) -> Iterator[Tensor]: ...


def arrange(
    tensors: Mapping[str, Tensor | Blocks | Sequence[Tensor]],
) -> tuple[bytes, int, Iterator[Tensor]]:
    """Return header, further bytes, and tensors in order. A sequence is written as one tensor."""
    found: list[tuple[str, torch.dtype, Sequence[int], Iterable[Tensor]]] = []
    for key, values in tensors.items():
        parts = [values] if isinstance(values, Tensor) else values
        if not isinstance(parts, Sequence):
            found.append((key, parts.dtype, parts.shape, parts))
        elif len(parts) == 1:
            found.append((key, parts[0].dtype, parts[0].shape, parts))
        else:
            found.append((key, parts[0].dtype, [sum(t.numel() for t in parts)], parts))
    # The order of the safetensors library: every tensor is aligned to its elements.
    found.sort(key=lambda one: (-one[1].itemsize, one[0]))
    header = make_header((one[:3] for one in found), {})
    size = sum(math.prod(shape) * dtype.itemsize for _, dtype, shape, _ in found)
    return header, size, (tensor.contiguous() for one in found for tensor in one[3])
