"""Correct rounding of the kernels' division by a constant, made of fused multiply-adds."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from cpu_adam.reference import fma


def divide(a, b):
    """Divide as `Divisor` in the kernels does.

    The note at `Divisor` explains the algorithm.
    """
    reciprocal = np.float32(1) / b
    product = a * reciprocal
    return fma(fma(-product, b, a), reciprocal, product)


def hard_pairs(divisors, shift, distance):
    """Yield dividends and divisors whose quotients are close to a midpoint of rounding.

    The distance is ``distance / b`` units of 2**-48 or 2**-47.

    With significands A and B: ``A * 2**shift - M * B == distance``, for an odd M of 25 bits. There
    is one such M modulo ``2**shift`` for an odd B.
    """
    inverse = divisors.copy()
    for _ in range(5):  # Newton's iteration modulo 2**26
        inverse = inverse * (2 - divisors * inverse) % 2**26
    first = -distance * inverse % 2**shift
    for middle in {25: (first,), 24: (first, first + 2**24)}[shift]:
        dividends = (middle * divisors + distance) >> shift
        is_pair = (middle % 2 == 1) & (middle > 2**24) & (middle < 2**25)
        is_pair &= (dividends >= 2**23) & (dividends < 2**24)
        is_pair &= (dividends < divisors) if shift == 25 else (dividends >= divisors)
        yield dividends[is_pair].astype(np.float32), divisors[is_pair].astype(np.float32)


@pytest.mark.parametrize("shift", [24, 25])
@pytest.mark.parametrize("distance", [-3, -1, 1, 3])
def test_quotients_closest_to_a_middle_are_rounded_correctly(shift, distance):
    divisors = np.random.default_rng(shift).integers(2**22, 2**23, 100_000) * 2 + 1
    num_pairs = 0
    for a, b in hard_pairs(divisors, shift, distance):
        np.testing.assert_array_equal(divide(a, b), a / b)
        num_pairs += a.size
    assert num_pairs > 2_500


def test_other_quotients_are_rounded_correctly():
    random = np.random.default_rng(0)
    a, b = random.integers(2**23, 2**24, (2, 250_000)).astype(np.float32)
    np.testing.assert_array_equal(divide(a, b), a / b)


def test_fma_of_the_reference_rounds_once():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(300).astype(np.float32) for _ in range(2))
    c = -(a * b) * (1 + rng.choice([0, 2**-24, 2**-23, -(2**-24)], 300)).astype(np.float32)
    fused = fma(a, b, c)
    for x, y, z, got in zip(a, b, c, fused, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        error = abs(Fraction(float(got)) - exact)
        for direction in (-np.inf, np.inf):
            other = np.nextafter(got, np.float32(direction))
            assert error <= abs(Fraction(float(other)) - exact)
