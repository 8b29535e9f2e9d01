"""safetensors files: index of their tensors, reads of ranges, and writers.

Ranges are read instead of mapped, because mapped pages stay in memory, which would then have the
data twice. The safetensors library opens a path even if it is a pipe. This module reads headers
from open regular files, and checks them against the file's size before allocating memory.
"""

from __future__ import annotations

import ctypes
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zero_core.checkpoint.storage import (
    ADVICE,
    Location,
    open_regular,
    size_of,
    storing,
    write_all,
    writing,
)
from zero_core.errors import CheckpointCorruptError, CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from zero_core.sharded.snapshot import StateBlocks

    Tensors = Mapping[str, Tensor | StateBlocks | Sequence[Tensor]]

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_EXPORTED = re.compile(r"model(-\d{5,}-of-\d{5,}(-patch\d+)?)?\.safetensors")  # also a patched file
DTYPES = {  # names in torch, and bytes of an element
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "C64": ("complex64", 8),
    "BOOL": ("bool", 1),
}
KEYS = {name: key for key, (name, _) in DTYPES.items()}  # by names in torch
CHUNK_BYTES = 16 << 20  # bytes under one CRC-32, in new checkpoints
_BLOCK_BYTES = 1 << 20  # small blocks stay in the CPU cache between write and checksum
MAX_FILE_BYTES = 5 * 1000**3  # limit of the tensors in a file; a larger tensor has its own file
_COPIED_BYTES = 16 * 1024**2  # bytes copied at a time
_MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors library
_MAX_INDEX_BYTES = 100_000_000
_MAX_DIMS = 64  # limit of torch's operators

_Count = Annotated[int, Field(ge=0)]


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    dtype: str
    shape: Annotated[tuple[_Count, ...], Field(max_length=_MAX_DIMS)]
    data_offsets: tuple[_Count, _Count]


class _Index(BaseModel):
    weight_map: dict[str, str]


class _Header(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    __pydantic_extra__: dict[str, _Entry]

    metadata: dict[str, str] = Field(default={}, alias="__metadata__")


@dataclass(frozen=True)
class StoredTensor:
    """Position of a contiguous tensor in a file. ``start`` is the offset of its first byte."""

    path: Location
    format: str  # dtype as the file has it: a key of `DTYPES`
    shape: tuple[int, ...]
    start: int

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.format)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.format][1]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def part(self, first: int, last: int) -> StoredTensor:
        start = self.start + first * self.itemsize
        return replace(self, shape=(last - first,), start=start)

    def read(self, first: int, last: int) -> Tensor:
        return self.part(first, last).value()

    def value(self) -> Tensor:
        with open_regular(self.path) as file:
            return self.read_from(file)

    def read_from(self, file: IO[bytes]) -> Tensor:
        import torch

        data = bytearray(self.numel * self.itemsize)
        if not data:
            return torch.empty(self.shape, dtype=self.dtype)
        left = memoryview(data)
        file.seek(self.start)
        while left.nbytes:
            count = file.readinto(left)  # type: ignore[attr-defined]
            if not count:
                raise CheckpointCorruptError(f"{self.path} ends within a tensor")
            left = left[count:]
        return torch.frombuffer(data, dtype=self.dtype).view(self.shape)


def find_tensors(source: str | Path | Sequence[str | Path]) -> dict[str, StoredTensor]:
    """Return the tensors, by name, of a file, several files, or a Hugging Face folder."""
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
    """Return the paths of a model's files: a file, several files, or a Hugging Face folder."""
    if not isinstance(source, str | Path):
        return [Path(path) for path in source]
    path = Path(source)
    if path.is_dir():
        if (path / _SINGLE).is_file():  # preferred by other readers, too
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


def read_header(path: Location) -> dict[str, StoredTensor]:
    with open_regular(path) as file:
        return read_open(file, path)[0]


def read_open(file: IO[bytes], path: Location) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Return the positions of an open file's tensors, and its metadata.

    The positions and error messages contain ``path``.
    """
    found, size = {}, size_of(file)
    try:
        start = file.read(8)
        if start[:4] == b"PK\x03\x04":
            raise CheckpointError(
                f"{path} is a zip archive, as torch.save writes: before build(), give it to "
                "model.load_state_dict(torch.load(...)), or write it with "
                "safetensors.torch.save_file(...)"
            )
        stop = length = 8 + int.from_bytes(start, "little")
        if length > min(size, _MAX_HEADER_BYTES):
            raise ValueError(f"it has {size} bytes, and a header of {length}")
        header = _Header.model_validate_json(file.read(length - 8))
        # Tensors must fill the file without gaps.
        entries = header.__pydantic_extra__.items()
        for name, entry in sorted(entries, key=lambda item: item[1].data_offsets):
            if entry.dtype not in DTYPES:
                raise CheckpointError(
                    f"{path}: tensor {name} has dtype {entry.dtype}, not read here"
                )
            tensor = StoredTensor(path, entry.dtype, entry.shape, stop)
            low, high = entry.data_offsets
            if length + low != stop or high - low != tensor.numel * tensor.itemsize:
                raise ValueError(
                    f"{name}, {entry.dtype} {entry.shape}, has the bytes {low} to {high}"
                )
            found[name] = tensor
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
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))[:200]
    return f"{place}: {first['msg']}" if place else first["msg"]


def dtype_of(key: str) -> torch.dtype:
    import torch

    found: torch.dtype = getattr(torch, DTYPES[key][0])
    return found


def dtype_name(dtype: torch.dtype, name: str) -> str:
    key = KEYS.get(str(dtype).removeprefix("torch."))
    if key is None:
        raise CheckpointError(f"{name} is {dtype}, which safetensors cannot hold")
    return key


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor. The tensor must outlive the result."""
    if not tensor.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


def make_header(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: dict[str, str]
) -> bytes:
    """Return the header of a file with ``tensors`` in this order. Its length is a multiple of 8."""
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


def arrange(tensors: Tensors) -> tuple[bytes, int, Iterator[Tensor]]:
    """Return a file's header, data size in bytes, and data. A sequence becomes one 1-D tensor."""
    from torch import Tensor

    from zero_core.sharded.snapshot import StateBlocks

    found: list[tuple[str, torch.dtype, Sequence[int], Iterable[Tensor]]] = []
    for key, values in tensors.items():
        if isinstance(values, StateBlocks):
            found.append((key, values.dtype, values.shape, values.blocks))
        elif isinstance(values, Tensor):
            found.append((key, values.dtype, values.shape, [values]))
        else:
            found.append((key, values[0].dtype, [sum(t.numel() for t in values)], values))
    # Larger dtypes first, as in the safetensors library, so that every tensor is aligned.
    found.sort(key=lambda one: (-one[1].itemsize, one[0]))
    header = make_header((one[:3] for one in found), {})
    size = sum(math.prod(shape) * dtype.itemsize for _, dtype, shape, _ in found)
    return header, size, (tensor.contiguous() for one in found for tensor in one[3])


def write_file(folder: Location, name: str, tensors: Tensors) -> dict[str, dict[str, Any]]:
    """Write a safetensors file (see `writing`). Return {name: size and checksums}."""
    path = folder / name
    with storing(path, ADVICE), writing(path) as file:
        return {name: write_summed(tensors, file)}


def write_summed(tensors: Tensors, file: IO[bytes] | None = None) -> dict[str, Any]:
    size, crcs = 0, [0]
    header, _, values = arrange(tensors)
    parts: Iterable[bytes | Tensor] = chain([header], values)
    for value in parts:
        data = memoryview(value) if isinstance(value, bytes) else bytes_of(value)
        while data.nbytes:
            used = size % CHUNK_BYTES
            if size and not used:
                crcs.append(0)
            block = data[: min(CHUNK_BYTES - used, _BLOCK_BYTES)]
            crcs[-1] = zlib.crc32(block, crcs[-1])
            if file is not None:
                write_all(file, block)
            size += block.nbytes
            data = data[block.nbytes :]
    return {"bytes": size, "crc32": crcs}


class TensorBuffer:
    """Tensors of a future safetensors file, collected in another file.

    A safetensors file begins with its header, which is known only after the last tensor.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        self.raw = raw  # the tensors without a header
        self.nbytes = 0  # bytes written so far
        self._written: list[tuple[str, torch.dtype, tuple[int, ...], int, int]] = []

    def add(self, name: str, value: Tensor) -> None:
        data = value.cpu().contiguous()  # keeps the memory alive while its bytes are written
        write_all(self.raw, bytes_of(data))
        shape = tuple(value.shape)
        self._written.append((name, value.dtype, shape, self.nbytes, value.nbytes))
        self.nbytes += value.nbytes

    def write_to(self, file: IO[bytes], metadata: dict[str, str]) -> dict[str, int]:
        """Write the safetensors file to ``file``. Return the tensors' sizes in bytes by name."""
        # Larger dtypes first, as in `arrange`, so that every tensor is aligned.
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
    """Writer of ``model.safetensors``, or of several files (see `MAX_FILE_BYTES`) and an index.

    Call `add` for each tensor and then `finish`, or `discard` after an error. Until `finish`, files
    have the names ``part-NUMBER.tmp``, because the final names contain the number of files.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pending: TensorBuffer | None = None  # tensors of the next file
        self._parts: list[dict[str, int]] = []  # for each closed file, bytes by tensor name

    def add(self, name: str, value: Tensor) -> None:
        from zero_core._torch import inner_tensors

        if inner_tensors(value) is not None:
            raise CheckpointError(
                f"{name} is a {type(value).__name__}, a tensor subclass, which safetensors "
                "cannot hold: keep a training by save_checkpoint(), take the state dict from "
                "full_state_dict(), or merge adapters and export the dequantized weights"
            )
        dtype_name(value.dtype, name)  # raises if the format lacks the dtype
        if self._pending is not None and self._pending.nbytes + value.nbytes > MAX_FILE_BYTES:
            self._close_part()
        with storing(self._part(len(self._parts))):
            self._open_part().add(name, value)

    def finish(self) -> None:
        """Replace an earlier export by the new files, with an index if there are several."""
        if self._pending is not None or not self._parts:
            self._close_part()
        # Remove an earlier export, because readers might prefer its files.
        for old in list(self._directory.iterdir()):
            if old.name == INDEX or _EXPORTED.fullmatch(old.name):
                old.unlink(missing_ok=True)
        count = len(self._parts)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        for number, name in enumerate(names if count > 1 else [_SINGLE]):
            self._part(number).replace(self._directory / name)
        if count > 1:
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
        path = self._part(len(self._parts))
        with storing(path):
            pending = self._open_part()
            with path.open("wb") as file:
                self._parts.append(pending.write_to(file, {"format": "pt"}))
        pending.raw.close()
        (self._directory / "part-data.tmp").unlink()
        self._pending = None
