"""Arrays for kernel tests, DLPack capsules with any header, and bitwise comparison."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

HYPER: dict[str, Any] = {
    "step": 3,
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.01,
}


def spread(rng: np.random.Generator, numel: int) -> np.ndarray:
    """Draw numbers over many orders of magnitude, where rounding errors are most visible."""
    values = rng.standard_normal(numel) * 10.0 ** rng.integers(-12, 6, numel)
    return values.astype(np.float32)


def make_arrays(numel: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "master": spread(rng, numel),
        "grad": spread(rng, numel),
        "exp_avg": spread(rng, numel),
        "exp_avg_sq": np.abs(spread(rng, numel)),
    }


def to_bits(array: np.ndarray) -> np.ndarray:
    """Return the bits. All NaNs are equal, because a NaN's sign and payload depend on the CPU."""
    if array.dtype == np.uint16:
        is_nan = (array & 0x7FFF) > 0x7F80
        return np.where(is_nan, np.uint16(0x7FC0), array)
    canonical = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
    return canonical.view(np.uint32 if array.dtype == np.float32 else np.uint16)


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(to_bits(actual), to_bits(expected))


class Bfloat16:
    """bf16 array for DLPack, stored as uint16, because NumPy has no bf16."""

    def __init__(self, bits: np.ndarray) -> None:
        self.bits = bits

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **_: Any) -> object:
        return make_capsule(self.bits, code=4)


def make_capsule(
    array: np.ndarray,
    *,
    code: int,
    bits: int | None = None,
    lanes: int = 1,
    shape: tuple[int, ...] | None = None,
    strides: tuple[int, ...] | None = None,
    version: tuple[int, int] | None = None,
    is_read_only: bool = False,
    name: bytes | None = None,
    address: int | None = None,
) -> object:
    """Create a DLPack capsule over NumPy memory, with any header."""
    shape = array.shape if shape is None else shape

    class Tensor(ctypes.Structure):
        _fields_ = (
            ("data", ctypes.c_void_p),
            ("device_type", ctypes.c_int32),
            ("device_id", ctypes.c_int32),
            ("ndim", ctypes.c_int32),
            ("code", ctypes.c_uint8),
            ("bits", ctypes.c_uint8),
            ("lanes", ctypes.c_uint16),
            ("shape", ctypes.POINTER(ctypes.c_int64)),
            ("strides", ctypes.POINTER(ctypes.c_int64)),
            ("byte_offset", ctypes.c_uint64),
        )

    class Managed(ctypes.Structure):
        _fields_ = (
            ("tensor", Tensor),
            ("context", ctypes.c_void_p),
            ("deleter", ctypes.c_void_p),
        )

    class Versioned(ctypes.Structure):
        _fields_ = (
            ("major", ctypes.c_uint32),
            ("minor", ctypes.c_uint32),
            ("context", ctypes.c_void_p),
            ("deleter", ctypes.c_void_p),
            ("flags", ctypes.c_uint64),
            ("tensor", Tensor),
        )

    tensor = Tensor(
        data=array.ctypes.data if address is None else address,
        device_type=1,
        ndim=len(shape),
        code=code,
        bits=array.itemsize * 8 if bits is None else bits,
        lanes=lanes,
        shape=(ctypes.c_int64 * len(shape))(*shape),
        strides=None if strides is None else (ctypes.c_int64 * len(shape))(*strides),
    )
    managed: ctypes.Structure
    if version is None:
        managed, default_name = Managed(tensor=tensor), b"dltensor"
    else:
        managed = Versioned(
            major=version[0], minor=version[1], flags=int(is_read_only), tensor=tensor
        )
        default_name = b"dltensor_versioned"
    label = ctypes.c_char_p(default_name if name is None else name)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    capsule = new(ctypes.addressof(managed), label, None)
    _kept.append((managed, tensor, label, array))
    return capsule


# Keeps the memory of capsules alive, because the capsules have no destructor.
_kept: list[object] = []


def as_argument(array: np.ndarray | None) -> Any:
    """Wrap uint16 arrays, which represent bf16 in `cpu_adam.reference`, as bf16 for the kernels."""
    return Bfloat16(array) if array is not None and array.dtype == np.uint16 else array


def copies(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in arrays.items()}
