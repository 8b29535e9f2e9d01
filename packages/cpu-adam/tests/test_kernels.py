"""Every compiled kernel gives the bits of `cpu_adam.reference`."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    assert_kernel_is_reference,
    assert_same_bits,
    copies,
    make_arrays,
    run_kernel,
)
from rule_cases import narrow

import cpu_adam
from cpu_adam import _isa, reference

GRAD_DTYPES = [np.float32, np.float16, np.uint16]
OUT_DTYPES = [None, np.float32, np.float16, np.uint16]
LENGTHS = [0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 1000]


@pytest.mark.parametrize(("beta2", "step"), [(0.999, 1), (0.999, 777), (0.95, 3), (0.5, 2)])
def test_the_division_by_the_bias_correction_is_rounded_correctly(isa, beta2, step, hyper):
    # Many significands of the second moment, over 40 powers of two. The weight becomes the
    # quotient of a constant by what was divided: a quotient that is off shows.
    numel = 1 << 18
    significands = np.random.default_rng(step).integers(2**23, 2**24, numel)
    exp_avg_sq = np.ldexp(significands, np.arange(numel) % 40 - 60).astype(np.float32)
    ones, zeros = np.ones(numel, np.float32), np.zeros(numel, np.float32)
    arrays = {"master": zeros, "grad": zeros, "exp_avg": ones, "exp_avg_sq": exp_avg_sq}
    hyper.update(beta2=beta2, step=step, eps=0.0, weight_decay=0.0)
    assert_kernel_is_reference(arrays, **hyper)


@pytest.mark.parametrize("adamw_mode", [True, False])
@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_each_mode_matches_the_reference(isa, adamw_mode, bias_correction, weight_decay, hyper):
    for beta1, step in product([0.0, 0.3, 0.5, 0.9], [1, 1000, 2**40]):
        hyper.update(weight_decay=weight_decay, beta1=beta1, step=step)
        assert_kernel_is_reference(
            make_arrays(133), adamw_mode=adamw_mode, bias_correction=bias_correction, **hyper
        )


@given(
    seed=st.integers(0, 2**32 - 1),
    numel=st.integers(0, 70),
    lr=st.floats(0, 1e3),
    beta1=st.floats(0, 1, exclude_max=True),
    beta2=st.floats(0, 1, exclude_max=True),
    eps=st.floats(0, 1e-3),
    weight_decay=st.floats(0, 10),
    step=st.integers(1, 10**6),
    grad_scale=st.floats(-1e3, 1e3),
    adamw_mode=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_random_hyperparameters_match_the_reference(seed, numel, **hyper):
    arrays = make_arrays(numel, seed)
    for name in cpu_adam.available_isas():
        with _isa.use_isa(name):
            assert_kernel_is_reference(arrays, **hyper)


@pytest.mark.parametrize("dtype", [np.float16, np.uint16])
def test_every_16_bit_gradient_is_read_right(isa, dtype, hyper):
    arrays = make_arrays(2**16)
    arrays["grad"] = np.arange(2**16, dtype=np.uint16).view(dtype)
    assert_kernel_is_reference(arrays, **hyper)


def rounding_cases() -> np.ndarray:
    """All fp16 and bf16 values, their midpoints, and the fp32 neighbours of each."""
    every = np.arange(2**16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        values = np.concatenate([every.view(np.float16).astype(np.float32)])
    bits = np.concatenate([values.view(np.uint32), every.astype(np.uint32) << 16])
    halves = [0, 0x1000, 0x8000]
    around = [bits + np.uint32(half) + np.uint32(d) for half in halves for d in (0, 1, 2**32 - 1)]
    return np.concatenate(around).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("dtype", [np.float16, np.uint16, np.float32])
def test_out_is_rounded_to_nearest_even_and_keeps_nan(isa, dtype, hyper):
    master = rounding_cases()
    hyper.update(lr=0.0, weight_decay=0.0, eps=1.0)
    arrays = {
        "master": master.copy(),
        "grad": np.zeros_like(master),
        "exp_avg": np.zeros_like(master),
        "exp_avg_sq": np.zeros_like(master),
    }
    out = np.zeros(master.shape, dtype)
    run_kernel(arrays, out, **hyper)
    with np.errstate(over="ignore", invalid="ignore"):
        # - 0.0 + (-0.0 / 1) and so on: the update itself must leave values alone
        expected = narrow(arrays["master"], dtype)
    assert_same_bits(arrays["master"], master)
    assert_same_bits(out, expected)
    widened = reference.bfloat16_to_float32(out) if dtype is np.uint16 else out
    np.testing.assert_array_equal(np.isnan(widened), np.isnan(master))


def test_subnormal_infinite_and_nan_elements_match_the_reference(isa, hyper):
    special = np.array(
        [
            0.0,
            -0.0,
            1e-45,
            -1e-45,
            1e-39,
            1.2e-38,
            1e-20,
            1.0,
            3e38,
            -3e38,
            np.inf,
            -np.inf,
            np.nan,
        ],
        np.float32,
    )
    grid = np.meshgrid(special, special, special, np.abs(special), indexing="ij")
    names = ["master", "grad", "exp_avg", "exp_avg_sq"]
    arrays = {n: np.ascontiguousarray(a.reshape(-1)) for n, a in zip(names, grid, strict=True)}
    assert_kernel_is_reference(arrays, np.float16, **hyper)
    assert_kernel_is_reference(arrays, np.uint16, adamw_mode=False, **hyper)


def test_an_element_gets_the_same_bits_wherever_it_lies(isa, hyper):
    arrays = make_arrays(100)
    whole = copies(arrays)
    run_kernel(whole, **hyper)
    for start, stop in [(0, 1), (1, 8), (3, 20), (50, 83), (99, 100)]:
        part = {name: array[start:stop].copy() for name, array in arrays.items()}
        run_kernel(part, **hyper)
        for name in part:
            assert_same_bits(part[name], whole[name][start:stop])


def test_fma_of_the_reference_rounds_once():
    rng = np.random.default_rng(0)
    from fractions import Fraction

    a, b = (rng.standard_normal(300).astype(np.float32) for _ in range(2))
    c = -(a * b) * (1 + rng.choice([0, 2**-24, 2**-23, -(2**-24)], 300)).astype(np.float32)
    fused = reference.fma(a, b, c)
    for x, y, z, got in zip(a, b, c, fused, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        error = abs(Fraction(float(got)) - exact)
        for other in (
            np.nextafter(got, np.float32(-np.inf)),
            np.nextafter(got, np.float32(np.inf)),
        ):
            assert error <= abs(Fraction(float(other)) - exact)
