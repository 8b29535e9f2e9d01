"""Memory of arguments: torch tensors, NumPy arrays, and objects that support DLPack.

Kernels receive addresses without checks, so memory is checked here.
"""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import numpy as np

from cpu_adam import _kernels

# Codes of element types, shared with native/kernels.h. SPLIT as the type of ``out`` means a split
# master weight. The integer types are used in Python only.
FLOAT32, BFLOAT16, FLOAT16, NO_OUT, SPLIT, INT8, UINT8, INT16 = range(8)

ITEM_BYTES = (4, 2, 2, 0, 2, 1, 1, 2)

_TYPE_NAMES = ("float32", "bfloat16", "float16", "", "", "int8", "uint8", "int16")
_TYPES = {name: code for code, name in enumerate(_TYPE_NAMES) if name}

# DLPack's (type code, bits), and its device types with host memory.
_DLPACK_TYPES = {(2, 32): FLOAT32, (2, 16): FLOAT16, (4, 16): BFLOAT16}
_DLPACK_TYPES |= {(0, 8): INT8, (1, 8): UINT8, (0, 16): INT16}
_DLPACK_HOST_DEVICES = (1, 3, 11)  # CPU, CUDA pinned, ROCm pinned

_NOT_CONTIGUOUS = "must be contiguous in memory (row-major); pass a contiguous copy"
_READ_ONLY = "is written to, but its memory is read-only"

_torch_types: dict[Any, int] = {}


class Block(NamedTuple):
    """Contiguous host memory of one argument, valid while ``owner`` exists."""

    address: int
    shape: tuple[int, ...]
    numel: int
    type: int
    owner: object

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_BYTES[self.type]


def loaded_torch() -> Any | None:
    """Return torch if the program has imported it, otherwise None."""
    torch = sys.modules.get("torch")
    # foreign: torch, perhaps partially imported.
    return torch if hasattr(torch, "autograd") else None


def describe(name: str, value: Any, *, is_written: bool, types: tuple[int, ...]) -> Block:
    """Find the memory of argument ``name``: a torch tensor, NumPy array or DLPack object.

    With ``is_written``, read-only NumPy and DLPack memory is refused. ``types``: allowed types.
    """
    torch = loaded_torch()
    if torch is not None and isinstance(value, torch.Tensor):
        return _describe_torch(name, value, torch, types)
    if isinstance(value, np.ndarray):
        return _describe_numpy(name, value, is_written=is_written, types=types)
    # foreign: any library's array
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        return _describe_dlpack(name, value, is_written=is_written, types=types)
    raise TypeError(
        f"{name}: expected a torch tensor, a NumPy array or an object with __dlpack__, "
        f"got {type(value).__name__}"
    )


def _wrong_type(name: str, found: object, types: tuple[int, ...]) -> TypeError:
    allowed = ", ".join(_TYPE_NAMES[code] for code in types)
    return TypeError(f"{name}: dtype must be {allowed}; got {found}")


def torch_address(name: str, tensor: Any) -> int:
    """Return the address of a torch CPU tensor that has memory for every element.

    Raises ValueError for a wrapper (a fake tensor, a functorch level) or a freed storage
    (``resize_(0)``).
    """
    try:
        storage = tensor.untyped_storage()
        is_real = storage.device.type == "cpu"
        address = tensor.data_ptr() if is_real else 0
    except RuntimeError:
        is_real = False
    if not is_real:
        raise ValueError(f"{name}: a {type(tensor).__name__} has no host memory of its own")
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if tensor.numel() and (storage.nbytes() < needed or address == 0):
        raise ValueError(f"{name}: its memory has been freed (or was never allocated)")
    return int(address)


def _describe_torch(name: str, tensor: Any, torch: Any, types: tuple[int, ...]) -> Block:
    if not _torch_types:
        _torch_types.update({getattr(torch, name): code for name, code in _TYPES.items()})
    if not tensor.is_cpu:
        raise ValueError(f"{name}: must be in host memory, got a tensor on {tensor.device}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name}: must be dense, got layout {tensor.layout}")
    code = _torch_types.get(tensor.dtype, -1)
    if code not in types:
        raise _wrong_type(name, tensor.dtype, types)
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: {_NOT_CONTIGUOUS}")
    if tensor.is_neg():
        raise ValueError(f"{name}: is a lazily negated view; pass tensor.resolve_neg()")
    address = torch_address(name, tensor)
    return Block(address, tuple(tensor.shape), tensor.numel(), code, tensor)


def _describe_numpy(name: str, array: Any, *, is_written: bool, types: tuple[int, ...]) -> Block:
    dtype = array.dtype
    code = _TYPES.get(dtype.name, -1) if dtype.isnative else -1
    if code not in types:
        raise _wrong_type(name, dtype.str if not dtype.isnative else dtype.name, types)
    flags = array.flags
    if not flags.c_contiguous:
        raise ValueError(f"{name}: {_NOT_CONTIGUOUS}")
    if is_written and not flags.writeable:
        raise ValueError(f"{name}: {_READ_ONLY}")
    address: int = array.__array_interface__["data"][0]
    return Block(address, array.shape, array.size, code, array)


def _describe_dlpack(name: str, value: Any, *, is_written: bool, types: tuple[int, ...]) -> Block:
    device = int(value.__dlpack_device__()[0])
    if device not in _DLPACK_HOST_DEVICES:
        raise ValueError(f"{name}: must be in host memory, got DLPack device type {device}")
    try:
        try:
            capsule = value.__dlpack__(max_version=(1, 0), copy=False)
        except TypeError:  # a producer of DLPack 0.x
            capsule = value.__dlpack__()
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: does not export its memory: {error}") from error
    try:
        address, shape, strides, kind, bits, lanes, _, is_read_only = _kernels.read_dlpack(capsule)
    except TypeError as error:
        raise TypeError(f"{name}: its __dlpack__ gave something unusable: {error}") from None
    code = _DLPACK_TYPES.get((kind, bits), -1) if lanes == 1 else -1
    if code not in types:
        raise _wrong_type(name, f"DLPack type code {kind} with {bits} bits x {lanes}", types)
    numel = math.prod(shape)
    if any(size < 0 for size in shape) or (numel and not address):
        raise ValueError(f"{name}: its __dlpack__ gave shape {shape} at address {address:#x}")
    if strides is not None and not _is_row_major(shape, strides):
        raise ValueError(f"{name}: {_NOT_CONTIGUOUS}")
    if is_written and is_read_only:
        raise ValueError(f"{name}: {_READ_ONLY}")
    return Block(address, shape, numel, code, capsule)


def _is_row_major(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 0:
            return True
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def check_disjoint(written: dict[str, Block], read: dict[str, Block]) -> None:
    """Raise ValueError if memory that is written overlaps another argument's."""
    spans = sorted(
        (block.address, block.address + block.nbytes, name)
        for name, block in (written | read).items()
        if block.numel
    )
    ends = [(0, ""), (0, "")]  # furthest end so far of blocks that are only read, and written
    for start, stop, name in spans:
        is_written = name in written
        end, other = max(ends) if is_written else ends[True]
        if start < end:
            raise ValueError(f"{other} and {name}: their memory overlaps")
        ends[is_written] = max(ends[is_written], (stop, name))
