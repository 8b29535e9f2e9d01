"""Every update is bit-identical to `cpu_adam.reference` and writes nothing outside its arrays."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_cases import (
    assert_same_bits,
    copies,
    make_arrays,
)
from support.rule_cases import (
    BLOCK,
    UPDATES,
    assert_rule_is_reference,
    assert_same,
    make_int8,
    make_rule,
    narrow,
    run,
)

import cpu_adam
from cpu_adam import _isa, reference

# Lengths around multiples of 8 and 16 lanes, to test unrolled vector loops and their tails.
LENGTHS = [*range(3), 7, 8, 9, *range(15, 18), *range(31, 34), 63, 64, 65, *range(95, 98)]
LENGTHS += [127, 128, 129, 256, 300, 1000]
OUTPUTS = [
    (name, dtype)
    for name, update in UPDATES.items()
    for dtype in ((None, np.float32, np.float16, np.uint16) if update.has_out else (None,))
]
ADAM = [name for name, update in UPDATES.items() if update.function.startswith("adam_")]
SPECIAL = np.array(
    [0, -0.0, 1e-45, -1e-39, 1.2e-38, -1e-32, 1e-20, 1, 3e38, -3e38, np.inf, -np.inf, np.nan],
    np.float32,
)


@pytest.fixture(params=list(UPDATES))
def update(request):
    return UPDATES[request.param]


def test_every_length_matches_the_reference(isa, update):
    for numel in LENGTHS:
        assert_rule_is_reference(update.function, update.make(numel), **update.options)


@pytest.mark.parametrize("grad_dtype", [np.float32, np.float16, np.uint16])
@pytest.mark.parametrize(("name", "out_dtype"), OUTPUTS)
def test_each_pair_of_types_matches_the_reference(isa, name, grad_dtype, out_dtype):
    for numel in [5, 333]:
        update = UPDATES[name]
        arrays = update.make(numel, grad_dtype=grad_dtype)
        options = {**update.options, "grad_scale": 0.37}
        assert_rule_is_reference(update.function, arrays, out_dtype=out_dtype, **options)


@pytest.mark.parametrize("stride", [4, 1], ids=["aligned to a float", "not aligned"])
def test_unaligned_memory_gives_the_same_bits_and_that_around_it_is_left_alone(isa, update, stride):
    for numel in [1, 17, 50, 130, 1000]:
        arrays = update.make(numel) | (
            {"out": np.zeros(numel, np.float16)} if update.has_out else {}
        )
        moved, around = {}, []
        for shift, (name, array) in enumerate(arrays.items(), start=8):
            start, stop = shift * stride, shift * stride + array.nbytes
            raw = np.full(stop + 64, 7, np.uint8)
            moved[name] = raw[start:stop].view(array.dtype)
            moved[name][...] = array
            around += [raw[:start], raw[stop:]]
        run(getattr(cpu_adam, update.function), moved, **update.options)
        run(getattr(cpu_adam, update.function), arrays, **update.options)
        assert_same(moved, arrays)
        assert all((part == 7).all() for part in around)


@pytest.mark.parametrize("num_threads", [2, 5, 64])
def test_threads_do_not_change_bits(isa, update, num_threads):
    first = update.make(32 * 1024 + 333, grad_dtype=np.uint16)
    second = copies(first)
    run(getattr(cpu_adam, update.function), first, num_threads=1, **update.options)
    run(getattr(cpu_adam, update.function), second, num_threads=num_threads, **update.options)
    assert_same(second, first)


def test_special_numbers_match_the_reference(isa, update):
    made = update.make(0)
    names = [n for n, a in made.items() if a.dtype == np.float32 and not n.endswith("scale")]
    names += ["split master"] if "remainder" in made else []
    grid = np.meshgrid(*[SPECIAL] * len(names), indexing="ij")
    values = {name: each.reshape(-1).copy() for name, each in zip(names, grid, strict=True)}
    for name in {"exp_avg_sq", "state_sum"} & set(names):
        values[name] = np.abs(values[name])
    arrays = update.make(SPECIAL.size ** len(names))
    if "remainder" in arrays:
        arrays["param"], arrays["remainder"] = reference.split_master(values.pop("split master"))
    assert_rule_is_reference(update.function, {**arrays, **values}, **update.options)


@given(
    seed=st.integers(0, 2**64 - 1),
    numel=st.integers(0, 300),
    lr=st.floats(0, 1e3),
    beta1=st.floats(0, 1, exclude_max=True),
    beta2=st.floats(0, 1, exclude_max=True),
    eps=st.floats(0, 1e-3),
    weight_decay=st.floats(0, 10),
    momentum=st.floats(0.1, 2),
    dampening=st.floats(-1, 1),
    lr_decay=st.floats(0, 10),
    step=st.integers(1, 10**6),
    grad_scale=st.floats(-1e3, 1e3),
    adamw_mode=st.booleans(),
)
@settings(max_examples=60)
def test_random_hyperparameters_match_the_reference(seed, numel, **hyper):
    for key, update in UPDATES.items():
        names = {*update.options, "grad_scale"} | ({"adamw_mode"} if key in ADAM else set())
        options = {name: hyper[name] for name in names}
        arrays = update.make(numel, seed=seed)
        if update.function == "adam_step_bf16":
            options["seed"] = seed
        for name in cpu_adam.available_isas():
            with _isa.use_isa(name):
                assert_rule_is_reference(update.function, arrays, **options)


@pytest.mark.parametrize("name", ADAM)
def test_each_mode_of_adam_matches_the_reference(isa, name):
    update = UPDATES[name]
    modes = product([True, False], [True, False], [0.0, 0.1], [0.0, 0.3, 0.9], [1, 1000, 2**40])
    arrays = update.make(133)
    for adamw_mode, bias_correction, weight_decay, beta1, step in modes:
        options = {"adamw_mode": adamw_mode, "bias_correction": bias_correction}
        options |= {**update.options, "weight_decay": weight_decay, "beta1": beta1, "step": step}
        assert_rule_is_reference(update.function, arrays, **options)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("step", [1, 2])
def test_each_mode_of_sgd_matches_the_reference(isa, nesterov, step):
    options = {"step": step, "lr": 0.1, "momentum": 0.9, "nesterov": nesterov}
    arrays = make_rule("sgd_step", 100)
    assert_rule_is_reference("sgd_step", arrays, **options)
    del arrays["momentum_buffer"]
    assert_rule_is_reference("sgd_step", arrays, out_dtype=np.float16, step=step, lr=0.1)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("is_split", [True, False])
def test_a_block_of_8_bit_moments_that_is_not_finite_is_lost_alone(isa, value, is_split, hyper):
    arrays = make_int8(5 * BLOCK, is_split=is_split)
    arrays["grad"][3 * BLOCK + 7] = value
    after = assert_rule_is_reference("adam_step_8bit", arrays, **hyper)
    assert np.isnan(after["exp_avg_scale"]).tolist() == [False, False, False, True, False]
    # The NaN scale affects the same block at the next step, and no other block.
    after["grad"][:] = 1
    param = assert_rule_is_reference("adam_step_8bit", after, **hyper)["param"]
    is_nan = np.isnan(reference.bfloat16_to_float32(param) if is_split else param)
    assert (is_nan.reshape(5, -1).any(axis=1) == [0, 0, 0, 1, 0]).all()
    assert is_nan[3 * BLOCK : 4 * BLOCK].all()


@pytest.mark.parametrize(("beta2", "step"), [(0.999, 1), (0.999, 777), (0.95, 3), (0.5, 2)])
def test_the_division_by_the_bias_correction_is_rounded_correctly(isa, beta2, step, hyper):
    # Use many significands of the second moment, over 40 powers of two. The weight becomes a
    # constant divided by the bias-corrected root, which exposes an incorrect division.
    numel = 1 << 18
    significands = np.random.default_rng(step).integers(2**23, 2**24, numel)
    exp_avg_sq = np.ldexp(significands, np.arange(numel) % 40 - 60).astype(np.float32)
    ones, zeros = np.ones(numel, np.float32), np.zeros(numel, np.float32)
    arrays = {"master": zeros, "grad": zeros, "exp_avg": ones, "exp_avg_sq": exp_avg_sq}
    hyper.update(beta2=beta2, step=step, eps=0.0, weight_decay=0.0)
    assert_rule_is_reference("adam_step", arrays, **hyper)


@pytest.mark.parametrize("dtype", [np.float16, np.uint16])
def test_every_16_bit_gradient_is_read_right(isa, dtype, hyper):
    arrays = make_arrays(2**16)
    arrays["grad"] = np.arange(2**16, dtype=np.uint16).view(dtype)
    assert_rule_is_reference("adam_step", arrays, **hyper)


def rounding_cases() -> np.ndarray:
    every = np.arange(2**16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        values = every.view(np.float16).astype(np.float32)
    bits = np.concatenate([values.view(np.uint32), every.astype(np.uint32) << 16])
    halves = [0, 0x1000, 0x8000]
    around = [bits + np.uint32(half) + np.uint32(d) for half in halves for d in (0, 1, 2**32 - 1)]
    return np.concatenate(around).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("dtype", [np.float16, np.uint16, np.float32])
def test_out_is_rounded_to_nearest_even_and_keeps_nan(isa, dtype, hyper):
    master = rounding_cases()
    zeros = {name: np.zeros_like(master) for name in ("grad", "exp_avg", "exp_avg_sq")}
    out = np.zeros(master.shape, dtype)
    arrays = {"master": master.copy(), **zeros, "out": out}
    run(cpu_adam.adam_step, arrays, **hyper | {"lr": 0.0, "weight_decay": 0.0, "eps": 1.0})
    assert_same_bits(arrays["master"], master)  # the update must not change values
    with np.errstate(over="ignore", invalid="ignore"):
        assert_same_bits(out, narrow(master, dtype))
    widened = reference.bfloat16_to_float32(out) if dtype is np.uint16 else out
    np.testing.assert_array_equal(np.isnan(widened), np.isnan(master))
