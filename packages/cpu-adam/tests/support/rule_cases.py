"""Arrays and comparisons for every update rule and every format of Adam's states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import cpu_adam
from cpu_adam import reference
from support.kernel_cases import HYPER, as_argument, assert_same_bits, copies, make_arrays, spread

BLOCK = reference.BLOCK_NUMEL


def narrow(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Convert fp32 values to ``dtype``, where uint16 represents bf16."""
    if dtype is np.uint16:
        return reference.float32_to_bfloat16(values)
    with np.errstate(over="ignore"):
        return values.astype(dtype)


def make_master(rng: np.random.Generator, numel: int, *, is_split: bool) -> dict[str, np.ndarray]:
    master = spread(rng, numel)
    if not is_split:
        return {"param": master}
    param, remainder = reference.split_master(master)
    return {"param": param, "remainder": remainder}


def make_int8(
    numel: int, *, is_split: bool, grad_dtype: Any = np.float32, seed: int = 0
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    codes = reference.quantize_moments(spread(rng, numel), np.abs(spread(rng, numel)))
    names = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")
    return {
        **make_master(rng, numel, is_split=is_split),
        "grad": narrow(spread(rng, numel), grad_dtype),
        **dict(zip(names, codes, strict=True)),
    }


def make_bf16(
    numel: int, *, is_split: bool, grad_dtype: Any = np.float32, seed: int = 0
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        **make_master(rng, numel, is_split=is_split),
        "grad": narrow(spread(rng, numel), grad_dtype),
        "exp_avg": narrow(spread(rng, numel), np.uint16),
        "exp_avg_sq": narrow(np.abs(spread(rng, numel)), np.uint16),
    }


STATES = {"adagrad_step": "state_sum", "lion_step": "exp_avg", "sgd_step": "momentum_buffer"}
OPTIONS: dict[str, dict[str, Any]] = {
    "adagrad_step": {"step": 3, "lr": 0.01, "lr_decay": 0.1, "weight_decay": 0.1},
    "lion_step": {"lr": 1e-4, "weight_decay": 0.1},
    "sgd_step": {"step": 3, "lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1},
}


def make_adam(numel: int, *, grad_dtype: Any = np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    arrays = make_arrays(numel, seed)
    arrays["grad"] = narrow(arrays["grad"], grad_dtype)
    return arrays


def make_split(numel: int, *, grad_dtype: Any = np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    arrays = make_adam(numel, grad_dtype=grad_dtype, seed=seed)
    param, remainder = reference.split_master(arrays.pop("master"))
    return {"param": param, "remainder": remainder, **arrays}


def make_rule(
    function: str, numel: int, *, grad_dtype: Any = np.float32, seed: int = 0
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    state = spread(rng, numel)
    return {
        "master": spread(rng, numel),
        "grad": narrow(spread(rng, numel), grad_dtype),
        STATES[function]: np.abs(state) if function == "adagrad_step" else state,
    }


@dataclass(frozen=True)
class Update:
    function: str
    make: Callable[..., dict[str, np.ndarray]]
    options: dict[str, Any]
    has_out: bool = True


UPDATES = {
    "adam_step": Update("adam_step", make_adam, HYPER),
    "adam_step_split": Update("adam_step_split", make_split, HYPER, has_out=False),
    **{
        f"{function}, {'split' if is_split else 'fp32'} master": Update(
            function, partial(make, is_split=is_split), HYPER, has_out=not is_split
        )
        for function, make in (("adam_step_8bit", make_int8), ("adam_step_bf16", make_bf16))
        for is_split in (True, False)
    },
    **{
        function: Update(function, partial(make_rule, function), OPTIONS[function])
        for function in STATES
    },
}


def assert_same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Compare arrays bit by bit, with all NaNs equal, and ignore remainders of NaN parameters."""
    for name, value in expected.items():
        other = actual[name]
        if name == "remainder":
            is_nan = np.isnan(reference.bfloat16_to_float32(expected["param"]))
            value, other = np.where(is_nan, 0, value), np.where(is_nan, 0, other)
        if value.dtype in (np.int8, np.uint8, np.int16, np.int64):
            np.testing.assert_array_equal(other, value, err_msg=name)
        else:
            assert_same_bits(other, value)


def run(function: Callable[..., None], arrays: dict[str, np.ndarray], **hyper: Any) -> None:
    function(**{name: as_argument(array) for name, array in arrays.items()}, **hyper)


def assert_rule_is_reference(
    name: str,
    arrays: dict[str, np.ndarray],
    *,
    out_dtype: Any = None,
    num_threads: int = 1,
    **hyper: Any,
) -> dict[str, np.ndarray]:
    """Run kernel and reference on copies, compare every array, and return the kernel's arrays."""
    if out_dtype is not None:
        first = next(iter(arrays.values()))
        arrays = {**arrays, "out": np.zeros(first.shape, out_dtype)}
    actual, expected = copies(arrays), copies(arrays)
    run(getattr(cpu_adam, name), actual, num_threads=num_threads, **hyper)
    getattr(reference, name)(**expected, **hyper)
    assert_same(actual, expected)
    return actual
