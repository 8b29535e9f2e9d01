"""`grad_norm_sq` has the same bits for every instruction set and thread count."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.kernel_cases import as_argument, spread
from support.rule_cases import narrow

import cpu_adam
from cpu_adam import reference

CHUNK = reference.CHUNK_NUMEL
DTYPES = [np.float32, np.float16, np.uint16]


def norm_sq(grad, **options):
    return cpu_adam.grad_norm_sq(as_argument(grad), **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 7, 15, 16, 17, 1000, CHUNK - 1, CHUNK, 5 * CHUNK + 17])
def test_every_length_matches_the_reference(isa, dtype, numel):
    rng = np.random.default_rng(0)
    grad = narrow(np.clip(spread(rng, numel), -6e4, 6e4), dtype)
    for scale in (1.0, 0.37, -2.0):
        expected = reference.grad_norm_sq(grad, grad_scale=scale)
        for num_threads in (1, 2, 3, 8):
            assert norm_sq(grad, grad_scale=scale, num_threads=num_threads) == expected
        assert expected[1]
    if dtype is np.float32:
        exact = (grad.astype(np.float64) ** 2).sum()
        np.testing.assert_allclose(norm_sq(grad).norm_sq, exact, rtol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", [0, 17, CHUNK, CHUNK + 20])
def test_one_element_that_is_not_finite_is_found(isa, dtype, value, where):
    values = np.ones(CHUNK + 21, np.float32)
    values[where] = value
    grad = narrow(values, dtype)
    assert not norm_sq(grad).is_finite
    assert not math.isfinite(norm_sq(grad).norm_sq)


def test_the_largest_finite_numbers_do_not_overflow(isa):
    largest = np.full(1000, np.finfo(np.float32).max)
    found = norm_sq(largest)
    assert found.is_finite
    assert math.isclose(found.norm_sq, 1000 * float(largest[0]) ** 2, rel_tol=1e-12)
    tiny = np.full(1000, 1e-45, np.float32)
    assert norm_sq(tiny).norm_sq > 0


def test_wrong_arguments_are_refused_by_name():
    for wrong, error in [
        (np.zeros(3), TypeError),
        ("text", TypeError),
        (np.zeros(6, np.float32)[::2], ValueError),
    ]:
        with pytest.raises(error, match=r"^grad: "):
            cpu_adam.grad_norm_sq(wrong)
    with pytest.raises(ValueError, match=r"^grad_scale: "):
        cpu_adam.grad_norm_sq(np.zeros(3, np.float32), grad_scale=float("inf"))
    with pytest.raises(ValueError, match=r"^num_threads: "):
        cpu_adam.grad_norm_sq(np.zeros(3, np.float32), num_threads=0)
