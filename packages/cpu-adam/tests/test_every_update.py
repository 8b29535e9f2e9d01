"""What holds for every update: the bits of `cpu_adam.reference`, whatever surrounds the arrays."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_cases import copies
from rule_cases import UPDATES, assert_rule_is_reference, assert_same, run

import cpu_adam

LENGTHS = [0, 1, 7, 8, 15, 16, 17, 33, 64, 65, 97, 127, 129, 256, 300, 1000]
# What a vector loop of 8 or 16 lanes, unrolled, and its remainder may miss.
ADAM_LENGTHS = [2, 9, 31, 32, 63, 95, 96, 128]
OUTPUTS = [
    (name, dtype)
    for name, update in UPDATES.items()
    for dtype in ((None, np.float32, np.float16, np.uint16) if update.has_out else (None,))
]


@pytest.fixture(params=list(UPDATES))
def update(request):
    return UPDATES[request.param]


def test_every_length_matches_the_reference(isa, update):
    for numel in LENGTHS:
        assert_rule_is_reference(update.function, update.make(numel), **update.options)


@pytest.mark.parametrize("numel", ADAM_LENGTHS)
def test_further_lengths_of_full_precision_adam_match_the_reference(isa, numel):
    update = UPDATES["adam_step"]
    assert_rule_is_reference(update.function, update.make(numel), **update.options)


@pytest.mark.parametrize("grad_dtype", [np.float32, np.float16, np.uint16])
@pytest.mark.parametrize(("name", "out_dtype"), OUTPUTS)
def test_each_pair_of_types_matches_the_reference(isa, name, grad_dtype, out_dtype):
    for numel in [5, 333]:
        update = UPDATES[name]
        arrays = update.make(numel, grad_dtype=grad_dtype)
        options = {**update.options, "grad_scale": 0.37}
        assert_rule_is_reference(update.function, arrays, out_dtype=out_dtype, **options)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_gradients_that_are_not_finite_match_the_reference(isa, update, value):
    arrays = update.make(300)
    arrays["grad"][37] = value
    assert_rule_is_reference(update.function, arrays, **update.options)


@pytest.mark.parametrize("stride", [4, 1], ids=["aligned to a float", "not aligned"])
def test_unaligned_memory_gives_the_same_bits(isa, update, stride):
    for numel in [1, 50, 1000]:
        arrays = update.make(numel)
        moved = {}
        for shift, (name, array) in enumerate(arrays.items(), start=1):
            raw = np.zeros(array.nbytes + 64, np.uint8)
            moved[name] = raw[shift * stride :][: array.nbytes].view(array.dtype)
            moved[name][...] = array
        run(getattr(cpu_adam, update.function), moved, **update.options)
        run(getattr(cpu_adam, update.function), arrays, **update.options)
        assert_same(moved, arrays)


def test_memory_around_the_arrays_is_left_alone(isa, update):
    for numel in [1, 17, 130]:
        arrays = update.make(numel)
        if update.has_out:
            arrays["out"] = np.zeros(numel, np.float16)
        raw = {name: np.full(array.nbytes + 64, 7, np.uint8) for name, array in arrays.items()}
        views = {name: raw[name][32:-32].view(array.dtype) for name, array in arrays.items()}
        for name, view in views.items():
            view[...] = arrays[name]
        run(getattr(cpu_adam, update.function), views, **update.options)
        for bytes_ in raw.values():
            assert (bytes_[:32] == 7).all()
            assert (bytes_[-32:] == 7).all()


@pytest.mark.parametrize("num_threads", [2, 5])
def test_threads_do_not_change_bits(isa, update, num_threads):
    first = update.make(3 * 32 * 1024 + 333, grad_dtype=np.uint16)
    second = copies(first)
    run(getattr(cpu_adam, update.function), first, num_threads=1, **update.options)
    run(getattr(cpu_adam, update.function), second, num_threads=num_threads, **update.options)
    assert_same(second, first)
