"""Several gradients in one pass: bit-identical to the reference, and to a precomputed sum."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from support.kernel_cases import as_argument, copies, spread
from support.rule_cases import OPTIONS, UPDATES, assert_same, make_rule, narrow

import cpu_adam
from cpu_adam import reference

CHUNK = reference.CHUNK_NUMEL
# Dtypes of gradients that are added, for example an fp32 sum and 16-bit micro-step gradients.
TYPES = (np.float32, np.uint16, np.float16, np.uint16, np.float32)
LENGTHS = [0, 1, 15, 33, 300, 2049, CHUNK + 333]


def make_grads(numel: int, count: int, types=TYPES) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [narrow(np.clip(spread(rng, numel), -6e4, 6e4), types[k]) for k in range(count)]


def plain_sum(grads: list[np.ndarray]) -> np.ndarray:
    """Sum in fp32 with NumPy alone, from left to right."""
    wide = [
        (g.astype(np.uint32) << 16).view(np.float32) if g.dtype == np.uint16 else g for g in grads
    ]
    total = wide[0].astype(np.float32)
    for other in wide[1:]:
        total = total + other.astype(np.float32)
    return total


def run(update, arrays, grads, **options):
    arguments = {name: as_argument(array) for name, array in arrays.items() if name != "grad"}
    grad = [as_argument(g) for g in grads] if isinstance(grads, list) else as_argument(grads)
    getattr(cpu_adam, update.function)(grad=grad, **arguments, **{**update.options, **options})


@pytest.mark.parametrize("name", list(UPDATES))
def test_every_update_of_several_gradients_matches_the_reference(isa, name):
    for numel, count in [*product(LENGTHS[:-1], [1, 2, 4, 5]), (LENGTHS[-1], 5)]:
        update, grads = UPDATES[name], make_grads(numel, count)
        actual = update.make(numel)
        if update.has_out:
            actual["out"] = np.zeros(numel, TYPES[(numel + count) % 3])
        expected, of_sum = copies(actual), copies(actual)
        first = next(iter(actual))
        kept, old = np.zeros_like(actual[first]), actual[first].copy()
        copied = [(as_argument(actual[first]), as_argument(kept))]
        run(update, actual, grads, grad_scale=0.37, num_threads=1 + count, copies=copied)
        np.testing.assert_array_equal(kept, old)
        options = {**update.options, "grad_scale": 0.37}
        getattr(reference, update.function)(**{**expected, "grad": grads}, **options)
        assert_same(actual, expected)
        run(update, of_sum, plain_sum(grads), grad_scale=0.37)
        assert_same(actual, of_sum)


def test_sgd_without_a_buffer_takes_several_gradients(isa):
    arrays, grads = make_rule("sgd_step", 100), make_grads(100, 2) * 2  # each gradient twice
    actual, expected = arrays["master"].copy(), arrays["master"].copy()
    options = {**OPTIONS["sgd_step"], "momentum": 0.0, "dampening": 0.0}
    cpu_adam.sgd_step(actual, [as_argument(g) for g in grads], **options)
    reference.sgd_step(expected, grads, **options)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("numel", [0, 17, CHUNK, 2 * CHUNK + 33])
def test_the_norm_of_several_gradients_is_that_of_their_sum(isa, numel):
    grads = make_grads(numel, 4)
    found = cpu_adam.grad_norm_sq([as_argument(g) for g in grads], grad_scale=0.37, num_threads=3)
    assert found == reference.grad_norm_sq(grads, grad_scale=0.37)
    assert found == cpu_adam.grad_norm_sq(plain_sum(grads), grad_scale=0.37, num_threads=1)


def test_finite_gradients_whose_sum_is_not_are_found(isa):
    largest = np.full(100, np.finfo(np.float32).max)
    assert cpu_adam.grad_norm_sq([largest]).is_finite
    assert not cpu_adam.grad_norm_sq([largest, largest.copy()]).is_finite


def test_wrong_gradients_are_refused_by_their_place():
    arrays = UPDATES["adam_step"].make(8)
    good = np.zeros(8, np.float32)
    for grads, error, message in [
        ([], ValueError, "at least one gradient"),
        ([good, np.zeros(7, np.float32)], ValueError, r"grad\[1\]: must have"),
        ([good, np.zeros(8)], TypeError, r"grad\[1\]: dtype"),
        ([good, arrays["master"]], ValueError, "overlaps"),
    ]:
        before = copies(arrays)
        with pytest.raises(error, match=message):
            run(UPDATES["adam_step"], arrays, grads)
        assert_same(arrays, before)
    with pytest.raises(ValueError, match=r"grad\[1\]: must have"):
        cpu_adam.grad_norm_sq([good, np.zeros(7, np.float32)])
