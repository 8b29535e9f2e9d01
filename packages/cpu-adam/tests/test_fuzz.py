"""Whatever `adam_step` is given, it succeeds or raises TypeError or ValueError; it never crashes.

``CPU_ADAM_FUZZ_CALLS`` sets the number of calls, ``CPU_ADAM_FUZZ_SEED`` where they begin; a failure
names the seed of the call. Run it with a sanitized build too: ``nox -s sanitize``.
"""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
from kernel_cases import HYPER, Bfloat16, make_capsule

import cpu_adam
from cpu_adam import _isa

try:
    import torch
except ImportError:  # then NumPy and DLPack alone
    torch = None

NUM_CALLS = int(os.environ.get("CPU_ADAM_FUZZ_CALLS", "3000"))
FIRST_SEED = int(os.environ.get("CPU_ADAM_FUZZ_SEED", "0"))

NAMES = ("master", "grad", "exp_avg", "exp_avg_sq", "out")
DTYPES = (
    *("f4", "f4", "f2", "u2", "f8", "i4", "i1", "c8", "?"),
    *(">f4", ">f2", "O", "U3", "V4", "M8[s]"),
)
LENGTHS = (0, 1, 2, 7, 8, 15, 16, 17, 64, 1000, 70_000)
SHAPES = ((4, 5), (2, 3, 7), (0, 5), (5, 0), (), (1, 1, 20))
NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 0.5, 1e-8, 1e30, -1e30, 1e-320, 1e39, 2**63, 10**400, True, None, "1", b"1", 1j),
    *(float("nan"), float("inf"), [1.0], (), {}, object(), np.float32(0.1), np.array(0.1)),
    *(np.array([0.1]), np.zeros(3), np.int8(3), 2**31, -(2**31), 10**30),
)
OBJECTS: tuple[Any, ...] = (
    *(None, 3, 0.1, "text", b"bytes", bytearray(80), memoryview(bytearray(80)), [1.0], (), {}),
    *(object(), object, np.float32(1), range(20), Ellipsis, len, np, float("nan")),
)


MOODS = ("plain", "plain", "versioned", "raise", "nonsense", "odd type", "negative", "null")


class Exporter:
    """An object with ``__dlpack__`` that may lie, raise, or return nonsense."""

    def __init__(self, choose: random.Random, array: np.ndarray) -> None:
        self.array = array
        self.device = choose.choice((1, 1, 1, 1, 2, 3, 99, -1))
        self.mood = choose.choice(MOODS)
        self.is_read_only = choose.random() < 0.3
        self.code = choose.choice((0, 1, 2, 4, 5, 255))
        self.lanes = choose.choice((0, 1, 2, 65535))
        self.error = choose.choice((BufferError, RuntimeError, TypeError, ValueError))

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)

    def __dlpack__(self, **_: Any) -> object:
        if self.mood == "raise":
            raise self.error("no")
        if self.mood == "nonsense":
            return 7
        if self.mood == "odd type":
            return make_capsule(self.array, code=self.code, lanes=self.lanes)
        if self.mood == "negative":
            return make_capsule(self.array, code=2, shape=(-1, -self.array.size))
        if self.mood == "null":
            return make_capsule(self.array, code=2, address=0)
        version = (1, 0) if self.mood == "versioned" else None
        return make_capsule(self.array, code=2, version=version, is_read_only=self.is_read_only)


def random_array(choose: random.Random, shape: tuple[int, ...]) -> np.ndarray:
    dtype = np.dtype(choose.choice(DTYPES))
    if dtype.hasobject or dtype.kind in "UVM":
        return np.zeros(shape, dtype)
    numel = int(np.prod(shape))
    raw = np.frombuffer(choose.randbytes(numel * dtype.itemsize + 8), np.uint8).copy()
    start = choose.choice((0, 0, 0, 1, 4))  # sometimes unaligned
    return raw[start : start + numel * dtype.itemsize].view(dtype).reshape(shape)


def distorted(choose: random.Random, array: np.ndarray) -> Any:
    """The array in another layout, place or guise."""
    how = choose.randrange(14)
    if how == 0:
        array = array[..., ::2] if array.ndim else array
    elif how == 1:
        array = array[::-1] if array.ndim else array
    elif how == 2:
        array = array.T
    elif how == 3:
        array = np.broadcast_to(array, (3, *array.shape))
    elif how == 4:
        array = array.copy()
        array.flags.writeable = False
    elif how == 5:
        array = np.ma.masked_array(array)
    elif how == 6 and array.dtype == np.float32 and array.size:
        array = np.lib.stride_tricks.as_strided(array, (array.size,), (0,))
    elif how == 7:
        array = array.reshape(-1)[: array.size // 2]
    elif how == 8 and array.dtype.kind == "f" and array.dtype.isnative and array.flags.c_contiguous:
        return Exporter(choose, array)
    elif how == 9 and array.dtype == np.uint16 and array.flags.c_contiguous:
        return Bfloat16(array)
    elif how in (10, 11, 12):
        return as_torch(choose, array)
    return array


def as_torch(choose: random.Random, array: np.ndarray) -> Any:
    """A torch tensor of some kind, or the array itself where torch is not installed."""
    if torch is None or array.dtype.kind not in "fic" or not array.dtype.isnative:
        return array
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    if any(stride % array.itemsize for stride in array.strides):
        array = array.copy()
    tensor = torch.from_numpy(array)
    kinds = ("plain", "plain", "bfloat16", "grad", "meta", "sparse", "freed", "neg", "parameter")
    kind = choose.choice(kinds)
    if kind == "bfloat16":
        return tensor.to(torch.bfloat16)
    if kind == "grad" and tensor.is_floating_point():
        return tensor.clone().requires_grad_()
    if kind == "parameter" and tensor.is_floating_point():
        return torch.nn.Parameter(tensor.clone())
    if kind == "meta":
        return torch.empty(tensor.shape, device="meta", dtype=tensor.dtype)
    if kind == "sparse" and tensor.ndim:
        return tensor.to_sparse()
    if kind == "freed":
        tensor = tensor.clone()
        tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() // 2)
        return tensor
    if kind == "neg" and tensor.is_complex():
        return tensor.conj().imag
    return tensor


def random_call(choose: random.Random) -> dict[str, Any]:
    """Keyword arguments of one call: mostly right, so that calls get past the first check."""
    shape = choose.choice(SHAPES) if choose.random() < 0.3 else (choose.choice(LENGTHS),)
    numel = int(np.prod(shape))
    memory = np.frombuffer(choose.randbytes(5 * numel * 4), np.float32).copy().reshape(5, *shape)
    arguments: dict[str, Any] = dict(zip(NAMES, memory, strict=True))
    if choose.random() < 0.4:
        arguments["grad"] = memory[1].astype(np.float16)
    if choose.random() < 0.4:
        arguments["out"] = choose.choice((None, Bfloat16(np.zeros(shape, np.uint16))))
    for name in NAMES:
        roll = choose.random()
        if roll < 0.04:
            arguments[name] = choose.choice(OBJECTS)
        elif roll < 0.10:
            arguments[name] = random_array(choose, shape)
        elif roll < 0.16:
            arguments[name] = distorted(choose, random_array(choose, shape))
        elif roll < 0.26 and isinstance(arguments[name], np.ndarray):
            arguments[name] = distorted(choose, arguments[name])
        elif roll < 0.30:  # overlapping the others, by some elements or all
            start = choose.randrange(4 * numel + 1)
            arguments[name] = memory.reshape(-1)[start : start + numel].reshape(shape)
    arguments |= HYPER
    arguments["num_threads"] = choose.choice((1, 1, 2, 3))
    for name in (*HYPER, "grad_scale", "num_threads", "adamw_mode", "bias_correction"):
        if choose.random() < 0.04:
            arguments[name] = choose.choice(NUMBERS)
    return arguments


def make_call(seed: int) -> str:
    """Make the call of ``seed``; returns how it ended."""
    choose = random.Random(seed)
    with np.errstate(all="ignore"):
        arguments = random_call(choose)
    with _isa.use_isa(choose.choice(cpu_adam.available_isas())):
        try:
            cpu_adam.adam_step(**arguments)
        except (TypeError, ValueError) as error:
            return type(error).__name__
        except BaseException as error:
            error.add_note(f"in the call of seed {seed}: {arguments!r:.2000}")
            raise
    return "success"


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
def test_any_call_succeeds_or_raises_type_error_or_value_error():
    endings = [make_call(seed) for seed in range(FIRST_SEED, FIRST_SEED + NUM_CALLS)]
    assert set(endings) <= {"success", "TypeError", "ValueError"}
    if NUM_CALLS >= 1000:  # the fuzzer reaches both the kernels and the checks
        for ending in ("success", "TypeError", "ValueError"):
            assert endings.count(ending) > NUM_CALLS // 20, ending
