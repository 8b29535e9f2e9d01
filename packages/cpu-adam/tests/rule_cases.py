"""Inputs and comparisons for the rules with compact states, and for those other than Adam."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from kernel_cases import as_argument, assert_same_bits, copies, spread

import cpu_adam
from cpu_adam import reference

BLOCK = reference.BLOCK_NUMEL


def narrow(values: np.ndarray, dtype: Any) -> np.ndarray:
    """fp32 values in another type; uint16 stands for bf16."""
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


def assert_same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Bit by bit; but NaNs are equal, and a NaN parameter's remainder has no meaning."""
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
    """Run both on copies, compare every array, and return the kernel's."""
    if out_dtype is not None:
        first = next(iter(arrays.values()))
        arrays = {**arrays, "out": np.zeros(first.shape, out_dtype)}
    actual, expected = copies(arrays), copies(arrays)
    run(getattr(cpu_adam, name), actual, num_threads=num_threads, **hyper)
    getattr(reference, name)(**expected, **hyper)
    assert_same(actual, expected)
    return actual
