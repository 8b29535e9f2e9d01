"""Random calls of updates and norms: each succeeds, or raises an error that names an argument.

Errors must be a TypeError or ValueError whose message begins with the argument's name. No call may
crash.

``CPU_ADAM_FUZZ_CALLS`` sets the number of calls, and ``CPU_ADAM_FUZZ_SEED`` the first seed. A
failure reports the call's seed. ``nox -s "nightly(sanitize)"`` runs this test with sanitizers.
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
from support.kernel_cases import Bfloat16, make_capsule, spread
from support.rule_cases import UPDATES, Update, narrow

import cpu_adam
from cpu_adam import _isa
from cpu_adam._scalars import AdamHyper

try:
    import torch
except ImportError:  # test with NumPy and DLPack only
    torch = None

NUM_CALLS = int(os.environ.get("CPU_ADAM_FUZZ_CALLS", "2000"))
FIRST_SEED = int(os.environ.get("CPU_ADAM_FUZZ_SEED", "0"))
OPTIONS = ("grad_scale", "num_threads", "adamw_mode", "bias_correction", "nesterov", "seed")


def make_grad(numel: int, *, grad_dtype: Any, seed: int) -> dict[str, np.ndarray]:
    return {"grad": narrow(spread(np.random.default_rng(seed), numel), grad_dtype)}


FORMS = [*UPDATES.values(), Update("grad_norm_sq", make_grad, {}, has_out=False)]


def parameters_of(function: str) -> set[str]:
    names = set(inspect.signature(getattr(cpu_adam, function)).parameters)
    return names | (set(AdamHyper.__annotations__) if "hyper" in names else set())


KNOWN = {form.function: parameters_of(form.function) for form in FORMS}
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


class Exporter:
    """Object whose ``__dlpack__`` may misreport, raise, or return nonsense."""

    def __init__(self, choose: random.Random, array: np.ndarray) -> None:
        self.array = array
        self.device = choose.choice((1, 1, 1, 1, 2, 3, 99, -1))
        self.answer: Any = choose.choice(
            (
                *({}, {}, {}, {"version": (1, 0)}, {"version": (1, 0), "is_read_only": True}),
                {"code": choose.choice((0, 1, 4, 255)), "lanes": choose.choice((0, 1, 2, 65535))},
                *({"shape": (-1, -array.size)}, {"address": 0}, 7),
                *(kind("no") for kind in (BufferError, RuntimeError, TypeError, ValueError)),
            )
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)

    def __dlpack__(self, **_: Any) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        if isinstance(self.answer, dict):
            return make_capsule(self.array, **{"code": 2, **self.answer})
        return self.answer


def random_array(choose: random.Random, shape: tuple[int, ...]) -> np.ndarray:
    dtype = np.dtype(choose.choice(DTYPES))
    if dtype.hasobject or dtype.kind in "UVM":
        return np.zeros(shape, dtype)
    numel = int(np.prod(shape))
    raw = np.frombuffer(choose.randbytes(numel * dtype.itemsize + 8), np.uint8).copy()
    start = choose.choice((0, 0, 0, 1, 4))  # sometimes unaligned
    return raw[start : start + numel * dtype.itemsize].view(dtype).reshape(shape)


def frozen(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


def freed(tensor: Any) -> Any:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() // 2)
    return tensor


LAYOUTS = (
    lambda array: array[..., ::2],
    lambda array: array[::-1],
    lambda array: array.T,
    lambda array: np.broadcast_to(array, (3, *array.shape)),
    frozen,
    np.ma.masked_array,
    lambda array: np.lib.stride_tricks.as_strided(array, (array.size,), (0,)),
    lambda array: array.reshape(-1)[: array.size // 2],
)
TENSORS = (
    *(lambda tensor: tensor, lambda tensor: tensor, freed),
    lambda tensor: tensor.to(torch.bfloat16),
    lambda tensor: tensor.clone().requires_grad_(),
    lambda tensor: torch.nn.Parameter(tensor.clone()),
    lambda tensor: torch.empty(tensor.shape, device="meta", dtype=tensor.dtype),
    lambda tensor: tensor.to_sparse(),
    lambda tensor: tensor.conj().imag,
)


def distorted(choose: random.Random, array: np.ndarray) -> Any:
    """Return the array with another layout or type, or unchanged where that fails."""
    how = choose.random()
    if how < 0.1 and array.dtype.kind == "f" and array.dtype.isnative and array.flags.c_contiguous:
        return Exporter(choose, array)
    if how < 0.1 and array.dtype == np.uint16 and array.flags.c_contiguous:
        return Bfloat16(array)
    try:
        if how < 0.7 or torch is None:
            return choose.choice(LAYOUTS)(array)
        return choose.choice(TENSORS)(torch.from_numpy(array))
    except (IndexError, RuntimeError, TypeError, ValueError):
        return array


def bfloat16(choose: random.Random, bits: np.ndarray) -> Any:
    if torch is None or choose.random() < 0.5:
        return Bfloat16(bits)
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def overlapping(choose: random.Random, array: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return an array like ``array`` in the memory of ``other``, if that is large enough."""
    memory = other.reshape(-1).view(np.uint8)
    if memory.size < array.nbytes:
        return array
    start = choose.randrange(memory.size - array.nbytes + 1)
    return memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)


def random_call(choose: random.Random, form: Update) -> dict[str, Any]:
    """Return keyword arguments of a call, mostly valid ones, so that later checks are reached."""
    shape = choose.choice(SHAPES) if choose.random() < 0.3 else (choose.choice(LENGTHS),)
    numel, kinds = int(np.prod(shape)), (np.float32, np.float32, np.float16, np.uint16)
    arrays = form.make(numel, grad_dtype=choose.choice(kinds), seed=choose.randrange(9))
    if form.has_out and choose.random() < 0.4:
        arrays["out"] = np.zeros(numel, choose.choice(kinds))
    arguments: dict[str, Any] = {}
    for name, array in arrays.items():
        array = array if name.endswith("_scale") else array.reshape(shape)
        roll = choose.random()
        if roll < 0.04:
            arguments[name] = choose.choice(OBJECTS)
        elif roll < 0.10:
            arguments[name] = random_array(choose, shape)
        elif roll < 0.16:
            arguments[name] = distorted(choose, random_array(choose, shape))
        elif roll < 0.26:
            arguments[name] = distorted(choose, array)
        elif roll < 0.30 and array.dtype != np.uint16:
            arguments[name] = overlapping(choose, array, choose.choice([*arrays.values()]))
        else:
            arguments[name] = bfloat16(choose, array) if array.dtype == np.uint16 else array
    numbers = form.options | {"num_threads": choose.choice((1, 1, 2, 3))}
    for name in sorted({*OPTIONS, *numbers} & KNOWN[form.function]):
        if choose.random() < 0.04:
            numbers[name] = choose.choice(NUMBERS)
    return arguments | numbers


def make_call(seed: int) -> tuple[str, str]:
    """Make a random call. Return the function's name, and "success" or the type of the error."""
    choose = random.Random(seed)
    form = choose.choice(FORMS)
    function = form.function
    with np.errstate(all="ignore"):
        arguments = random_call(choose, form)
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
    if NUM_CALLS >= 1000:  # with enough calls, every function must succeed and raise each error
        for function in KNOWN:
            for ending in ("success", "TypeError", "ValueError"):
                assert endings[function, ending] > NUM_CALLS // 500, (function, ending)
