"""Random calls of updates and norms, each of which succeeds or names an argument.

No call crashes.

Every error is a TypeError or a ValueError that begins with the name of an argument.

``CPU_ADAM_FUZZ_CALLS`` sets the number of calls, ``CPU_ADAM_FUZZ_SEED`` where they begin; a failure
names the seed of the call. Run it with a sanitized build too: ``nox -s nightly -- sanitize``.
"""

from __future__ import annotations

import inspect
import os
import random
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from support.kernel_cases import HYPER, Bfloat16, make_capsule

import cpu_adam
from cpu_adam import _isa
from cpu_adam._scalars import AdamHyper
from cpu_adam.reference import BLOCK_NUMEL

try:
    import torch
except ImportError:  # then NumPy and DLPack alone
    torch = None

NUM_CALLS = int(os.environ.get("CPU_ADAM_FUZZ_CALLS", "2000"))
FIRST_SEED = int(os.environ.get("CPU_ADAM_FUZZ_SEED", "0"))

ADAM = {"master": "f4", "exp_avg": "f4", "exp_avg_sq": "f4"}
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
# The arrays of each function besides its gradient, of which there are several kinds.
LAYOUTS: dict[str, dict[str, str]] = {
    "adam_step": ADAM,
    "adam_step_8bit": {"exp_avg": "i1", "exp_avg_sq": "u1", **dict.fromkeys(SCALES, "f4")},
    "adam_step_bf16": {"exp_avg": "bf16", "exp_avg_sq": "bf16"},
    "adam_step_split": {"param": "bf16", "remainder": "i2", "exp_avg": "f4", "exp_avg_sq": "f4"},
    "lion_step": {"master": "f4", "exp_avg": "f4"},
    "sgd_step": {"master": "f4", "momentum_buffer": "f4"},
    "adagrad_step": {"master": "f4", "state_sum": "f4"},
    "grad_norm_sq": {},
}
COMPACT = ("adam_step_8bit", "adam_step_bf16")
HYPERS: dict[str, dict[str, Any]] = {
    **{name: HYPER for name in LAYOUTS if name.startswith("adam_")},
    "lion_step": {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1},
    "sgd_step": {"step": 2, "lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.1},
    "adagrad_step": {"step": 2, "lr": 0.1, "lr_decay": 0.1, "eps": 1e-10, "weight_decay": 0.1},
    "grad_norm_sq": {},
}
OPTIONS = ("grad_scale", "num_threads", "adamw_mode", "bias_correction", "nesterov", "seed")


def parameters_of(function: str) -> set[str]:
    """Return the names of a function's arguments, with those of Adam that it passes on."""
    names = set(inspect.signature(getattr(cpu_adam, function)).parameters)
    return names | (set(AdamHyper.__annotations__) if "hyper" in names else set())


KNOWN = {function: parameters_of(function) for function in LAYOUTS}
DTYPES = (
    *("f4", "f4", "f2", "u2", "f8", "i4", "i1", "u1", "i2", "c8", "?"),
    *(">f4", ">f2", "O", "U3", "V4", "M8[s]"),
)
LENGTHS = (0, 1, 2, 7, 8, 15, 16, 17, 64, 129, 1000, 70_000)
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
    """An object whose ``__dlpack__`` may misreport, raise, or return nonsense."""

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
    """Return the array in another layout, place or form."""
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
    """Return a torch tensor of some kind, or the array itself where torch is not installed."""
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


def bfloat16(choose: random.Random, bits: np.ndarray) -> Any:
    """Return bf16 memory, as a torch tensor or without torch."""
    if torch is None or choose.random() < 0.5:
        return Bfloat16(bits)
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def layout_of(choose: random.Random, function: str) -> dict[str, str]:
    """Choose the arrays of a function by name, each with a dtype or "bf16"."""
    layout = dict(LAYOUTS[function])
    if function in COMPACT:
        is_split = choose.random() < 0.5
        layout |= {"param": "bf16", "remainder": "i2"} if is_split else {"param": "f4"}
    layout["grad"] = choose.choice(("f4", "f4", "f2", "bf16"))
    if "out" in KNOWN[function] and choose.random() < (0.04 if "remainder" in layout else 0.4):
        layout["out"] = choose.choice(("f4", "f2", "bf16"))
    return layout


def random_arrays(
    choose: random.Random, function: str, shape: tuple[int, ...]
) -> tuple[dict[str, Any], np.ndarray]:
    """Return valid arrays for a function, and the memory that holds them side by side."""
    layout = layout_of(choose, function)
    numel = int(np.prod(shape))
    memory = np.frombuffer(choose.randbytes(len(layout) * numel * 4 + 8), np.uint8).copy()
    arrays: dict[str, Any] = {}
    for place, (name, kind) in enumerate(layout.items()):
        dtype = np.dtype("u2" if kind == "bf16" else kind)
        size = (-(-numel // BLOCK_NUMEL),) if name in SCALES else shape
        start = place * numel * 4
        raw = memory[start : start + int(np.prod(size)) * dtype.itemsize]
        array = raw.view(dtype).reshape(size)
        arrays[name] = bfloat16(choose, array) if kind == "bf16" else array
    return arrays, memory


def random_call(choose: random.Random, function: str) -> dict[str, Any]:
    """Return keyword arguments of one call, mostly valid so that it passes the first check."""
    shape = choose.choice(SHAPES) if choose.random() < 0.3 else (choose.choice(LENGTHS),)
    arguments, memory = random_arrays(choose, function, shape)
    numbers = HYPERS[function] | {"num_threads": choose.choice((1, 1, 2, 3))}
    for name in tuple(arguments):
        roll = choose.random()
        if roll < 0.04:
            arguments[name] = choose.choice(OBJECTS)
        elif roll < 0.10:
            arguments[name] = random_array(choose, shape)
        elif roll < 0.16:
            arguments[name] = distorted(choose, random_array(choose, shape))
        elif roll < 0.26 and isinstance(arguments[name], np.ndarray):
            arguments[name] = distorted(choose, arguments[name])
        elif roll < 0.30 and isinstance(arguments[name], np.ndarray):
            # Overlapping the others, by some bytes or all.
            array = arguments[name]
            start = choose.randrange(memory.size - array.nbytes + 1)
            raw = memory[start : start + array.nbytes]
            arguments[name] = raw.view(array.dtype).reshape(array.shape)
    for name in sorted({*OPTIONS, *numbers} & KNOWN[function]):
        if choose.random() < 0.04:
            numbers[name] = choose.choice(NUMBERS)
    return arguments | numbers


def make_call(seed: int) -> tuple[str, str]:
    """Make the call of ``seed``. Returns the function and how it ended."""
    choose = random.Random(seed)
    function = choose.choice(tuple(LAYOUTS))
    with np.errstate(all="ignore"):
        arguments = random_call(choose, function)
    with _isa.use_isa(choose.choice(cpu_adam.available_isas())):
        try:
            getattr(cpu_adam, function)(**arguments)
            return function, "success"
        except BaseException as error:
            named = re.match(r"(\w+)(\[\d+\])?( and \w+(\[\d+\])?)?: ", str(error))
            if isinstance(error, TypeError | ValueError) and named and named[1] in KNOWN[function]:
                return function, type(error).__name__
            error.add_note(f"in {function} of seed {seed}: {arguments!r:.2000}")
            raise


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
def test_any_call_succeeds_or_names_an_argument():
    endings = Counter(map(make_call, range(FIRST_SEED, FIRST_SEED + NUM_CALLS)))
    if NUM_CALLS >= 1000:  # the fuzzer reaches both the kernels and the checks
        for function in LAYOUTS:
            for ending in ("success", "TypeError", "ValueError"):
                assert endings[function, ending] > NUM_CALLS // 500, (function, ending)
