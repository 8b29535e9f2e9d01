"""Adagrad, Lion and SGD: modes, arguments, and the paper of Lion."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import assert_same_bits, copies
from rule_cases import OPTIONS, STATES, assert_rule_is_reference
from rule_cases import make_rule as make

import cpu_adam
from cpu_adam import _isa


@pytest.fixture(params=list(STATES))
def function(request):
    return request.param


@given(
    seed=st.integers(0, 2**32 - 1),
    numel=st.integers(0, 50),
    lr=st.floats(0, 1e3),
    weight_decay=st.floats(0, 10),
    momentum=st.floats(0.1, 2),
    dampening=st.floats(-1, 1),
    lr_decay=st.floats(0, 10),
    beta1=st.floats(0, 1, exclude_max=True),
    beta2=st.floats(0, 1, exclude_max=True),
    step=st.integers(1, 10**6),
    grad_scale=st.floats(-1e3, 1e3),
)
@settings(max_examples=50, deadline=None)
def test_random_hyperparameters_match_the_reference(
    seed, numel, momentum, dampening, lr_decay, beta1, beta2, step, **common
):
    own = {
        "adagrad_step": {"step": step, "lr_decay": lr_decay},
        "lion_step": {"beta1": beta1, "beta2": beta2},
        "sgd_step": {"step": step, "momentum": momentum, "dampening": dampening},
    }
    for name in cpu_adam.available_isas():
        with _isa.use_isa(name):
            for function, options in own.items():
                arrays = make(function, numel, seed=seed)
                assert_rule_is_reference(function, arrays, **options, **common)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("step", [1, 2])
def test_each_mode_of_sgd_matches_the_reference(isa, nesterov, step):
    options = {"step": step, "lr": 0.1, "momentum": 0.9, "nesterov": nesterov}
    assert_rule_is_reference("sgd_step", make("sgd_step", 100), **options)


def test_sgd_without_momentum_needs_no_buffer(isa):
    arrays = make("sgd_step", 100)
    del arrays["momentum_buffer"]
    assert_rule_is_reference("sgd_step", arrays, out_dtype=np.float16, step=1, lr=0.1)


def test_special_numbers_match_the_reference(isa, function):
    special = np.array([0, -0.0, 1e-45, -1e-39, 1e-20, 1, 3e38, -3e38, np.inf, np.nan], np.float32)
    grid = np.meshgrid(special, special, np.abs(special), indexing="ij")
    names = ["master", "grad", STATES[function]]
    arrays = {n: np.ascontiguousarray(a.reshape(-1)) for n, a in zip(names, grid, strict=True)}
    assert_rule_is_reference(function, arrays, **OPTIONS[function])


class TestArguments:
    def refuse(self, function, arrays, error, match, **changes):
        before = copies(arrays)
        with pytest.raises(error, match=match):
            getattr(cpu_adam, function)(**{**arrays, **OPTIONS[function], **changes})
        for name, array in arrays.items():
            assert_same_bits(array, before[name])

    def test_arrays_are_checked_by_name(self, function):
        arrays = make(function, 20)
        for name in arrays:
            wrong = {name: np.zeros(20, np.float64)}
            self.refuse(function, arrays, TypeError, f"^{name}: dtype", **wrong)
            if name != "master":
                wrong = {name: np.zeros(19, np.float32)}
                self.refuse(function, arrays, ValueError, f"^{name}: must have", **wrong)
                wrong = {name: arrays["master"][:]}
                self.refuse(function, arrays, ValueError, "memory overlaps", **wrong)

    @pytest.mark.parametrize("name", ["lr", "weight_decay", "grad_scale"])
    def test_numbers_are_checked_by_name(self, function, name):
        arrays = make(function, 20)
        for value in (float("nan"), float("inf"), 1e39):
            self.refuse(function, arrays, ValueError, f"^{name}: ", **{name: value})
        self.refuse(function, arrays, TypeError, f"^{name}: ", **{name: "1"})

    def test_what_sgd_cannot_do(self):
        arrays = make("sgd_step", 20)
        no_buffer = {"momentum_buffer": None}
        self.refuse("sgd_step", arrays, TypeError, "^momentum_buffer: expected", **no_buffer)
        self.refuse("sgd_step", arrays, ValueError, "^momentum_buffer: has no use", momentum=0.0)
        self.refuse("sgd_step", arrays, ValueError, "^nesterov: ", nesterov=True)
        self.refuse("sgd_step", arrays, ValueError, "^momentum: ", momentum=-1.0)
        self.refuse("sgd_step", arrays, ValueError, "^step: ", step=0)

    def test_what_adagrad_and_lion_cannot_do(self):
        self.refuse("adagrad_step", make("adagrad_step", 9), ValueError, "^step: ", step=0)
        self.refuse("adagrad_step", make("adagrad_step", 9), ValueError, "^lr_decay", lr_decay=-1)
        self.refuse("adagrad_step", make("adagrad_step", 9), ValueError, "^eps: ", eps=-1)
        self.refuse("lion_step", make("lion_step", 9), ValueError, "^beta1: ", beta1=1.0)
        self.refuse("lion_step", make("lion_step", 9), ValueError, "^beta2: ", beta2=-0.1)


def test_lion_is_the_papers_algorithm():
    """Algorithm 2 of arXiv 2302.06675, in double precision."""
    rng = np.random.default_rng(0)
    theta, momentum = rng.standard_normal(1000), np.zeros(1000)
    arrays = {"master": theta.astype(np.float32), "exp_avg": np.zeros(1000, np.float32)}
    eta, beta1, beta2, decay = 1e-3, 0.9, 0.99, 0.1
    for _ in range(20):
        grad = rng.standard_normal(1000).astype(np.float32)
        update = np.sign(beta1 * momentum + (1 - beta1) * grad)
        theta = theta - eta * (update + decay * theta)
        momentum = beta2 * momentum + (1 - beta2) * grad
        cpu_adam.lion_step(
            **arrays, grad=grad, lr=eta, beta1=beta1, beta2=beta2, weight_decay=decay
        )
    np.testing.assert_allclose(arrays["exp_avg"], momentum, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(arrays["master"], theta, rtol=1e-4, atol=1e-5)
