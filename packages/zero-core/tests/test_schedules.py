"""Schedules by name: the closed forms of their curves, and what is refused."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import zero_core
from zero_core import schedules
from zero_core.config.params import OPTIMIZER_PARAMS, SCHEDULER_PARAMS
from zero_core.errors import ConfigError, MissingPartError
from zero_core.schedules import SCHEDULERS, make_scheduler
from zero_core.testing import Case, make_tower

OPTIMIZERS = (
    *("Adam", "AdamW", "Adagrad", "SGD", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam"),
    *("ASGD", "Rprop", "Adafactor"),
)
TORCH_BY_NAME = {
    "StepLR": {"step_size": 2, "gamma": 0.5},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "PolynomialLR": {"total_iters": 5, "power": 2.0},
    "OneCycleLR": {"max_lr": 0.5, "total_steps": 12},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 0.4, "step_size_up": 3},
}


def optimizer_of(*rates, kind=torch.optim.AdamW):
    return kind([{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates])


def curve(optimizer, name, params, num_steps):
    """The first group's rate at each of ``num_steps`` optimizer steps."""
    schedule = make_scheduler(optimizer, name, params)
    rates = []
    for _ in range(num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


_LOG = [math.log(k + 1) / math.log(4) for k in range(4)]
_COSINE = [0.2 + 0.8 * (1 + math.cos(math.pi * part / 4)) / 2 for part in (1, 2, 3, 4)]
CURVES = {
    "linear warm-up reaches the top after its steps": (
        "WarmupLR",
        {"warmup_min_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"},
        [0.1, 0.1, 0.3, 0.5, 0.7, 0.9, 0.9, 0.9],
    ),
    "logarithmic warm-up decays to the bottom": (
        "WarmupDecayLR",
        {"total_num_steps": 8, "warmup_max_lr": 1.0, "warmup_num_steps": 4},
        [0.0, *_LOG, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0],
    ),
    "cosine ends at its smallest ratio": (
        "WarmupCosineLR",
        {
            "total_num_steps": 6,
            "warmup_num_steps": 2,
            "cos_min_ratio": 0.2,
            "warmup_min_ratio": 0.5,
            "warmup_type": "linear",
        },
        [0.9 * part for part in (0.0, 0.5, 0.75, *_COSINE, 0.2, 0.2)],
    ),
}


@pytest.mark.parametrize(("name", "params", "expected"), CURVES.values(), ids=CURVES)
def test_rates_are_those_of_the_closed_form(name, params, expected):
    found = curve(optimizer_of(0.9), name, params, len(expected))
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
@pytest.mark.parametrize(
    ("params", "as_with"),
    [
        # Trainers ask for 0 steps by default; 1 is what transformers gives DeepSpeed for it.
        ({"warmup_num_steps": 0}, {"warmup_num_steps": 1}),
        ({"warmup_num_steps": 4, "warmup_type": "cubic"}, {"warmup_num_steps": 4}),
    ],
)
def test_no_warm_up_is_the_shortest_and_an_unknown_one_logarithmic(name, params, as_with, caplog):
    total = {} if name == "WarmupLR" else {"total_num_steps": 6}
    found, expected = (curve(optimizer_of(0.9), name, {**total, **p}, 8) for p in (params, as_with))
    assert found == expected
    said = caplog.text.count("warmup_type = 'cubic' is neither")
    assert said == ("warmup_type" in params)


def test_every_group_has_bounds_of_its_own():
    optimizer = optimizer_of(0.1, 0.2)
    params = {"warmup_min_lr": [0.0, 1.0], "warmup_max_lr": [1.0, 3.0], "warmup_num_steps": 2}
    schedule = make_scheduler(optimizer, "WarmupLR", {**params, "warmup_type": "linear"})
    for expected in ([0.0, 1.0], [0.0, 1.0], [0.5, 2.0], [1.0, 3.0]):
        assert [group["lr"] for group in optimizer.param_groups] == expected
        assert schedule.get_last_lr() == expected
        schedule.step()


def test_rate_stays_the_same_tensor():
    optimizer = optimizer_of(torch.tensor(0.5))
    rate = optimizer.param_groups[0]["lr"]
    schedule = make_scheduler(optimizer, "WarmupLR", {"warmup_num_steps": 2})
    assert float(rate) == 0.0
    schedule.step(7)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5


def test_schedule_goes_on_from_a_given_iteration():
    params = {"warmup_num_steps": 4, "warmup_type": "linear", "last_batch_iteration": 1}
    optimizer = optimizer_of(8.0)
    schedule = make_scheduler(optimizer, "WarmupLR", params)
    assert optimizer.param_groups[0]["lr"] == 8.0  # the checkpoint brings it
    with pytest.raises(AssertionError, match=r"need to call step\(\) first"):
        schedule.get_last_lr()
    schedule.step()
    assert schedule.get_last_lr() == [4.0]


_NEEDED = {
    "WarmupDecayLR": {"total_num_steps": 9},
    "WarmupCosineLR": {"total_num_steps": 9},
}


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_loaded_schedule_continues_the_curve(name):
    params = _NEEDED.get(name, {})
    whole = curve(optimizer_of(0.5), name, params, 12)
    first, second = optimizer_of(0.5), optimizer_of(0.5)
    schedule = make_scheduler(first, name, params)
    for _ in range(5):
        schedule.step()
    again = make_scheduler(second, name, params)
    second.load_state_dict(first.state_dict())
    again.load_state_dict(schedule.state_dict())
    assert again.get_last_lr() == schedule.get_last_lr() == [whole[5]]
    for expected in whole[6:]:
        again.step()
        assert second.param_groups[0]["lr"] == expected


@pytest.mark.parametrize(("name", "params"), TORCH_BY_NAME.items())
def test_any_schedule_of_torch_is_made_by_its_name(name, params):
    theirs = optimizer_of(0.3)
    schedule = getattr(lr_scheduler, name)(theirs, **params)
    expected = []
    for _ in range(8):
        expected.append(theirs.param_groups[0]["lr"])
        theirs.step()
        schedule.step()
    assert curve(optimizer_of(0.3), name, params, 8) == expected
    assert len(set(expected)) > 2


@pytest.mark.parametrize(
    ("name", "params", "match"),
    [
        ("NoSuchLR", {}, "'NoSuchLR' is not served; known: .*'OneCycle'.*torch.optim.lr_scheduler"),
        ("LRScheduler", {}, "is not served"),
        ("math", {}, "is not served"),
        ("LambdaLR", {}, "it takes functions"),
        ("ReduceLROnPlateau", {}, "a measured value"),
        ("StepLR", {}, "step_size"),
        ("WarmupLR", {"warmup_num_steps": -1}, "warmup_num_steps must be a whole number >= 0"),
        ("WarmupLR", {"warmup_min_lr": [0, 0, 0]}, "warmup_min_lr: 3 values for 1 parameter"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(name, params, match):
    with pytest.raises(ConfigError, match=match):
        make_scheduler(optimizer_of(0.1), name, params)


@pytest.mark.parametrize("name", ["OneCycle", "LRRangeTest"])
def test_a_schedule_of_zero_engine_is_refused_by_name_where_that_is_missing(name, monkeypatch):
    monkeypatch.setattr(schedules, "entry_points", lambda **kwargs: ())
    config = Case(top={"scheduler": {"type": name}}).config()
    found = rf"scheduler.type = '{name}' needs the package zero-engine.*pip install"
    with pytest.raises(MissingPartError, match=found):
        zero_core.build(make_tower(), config)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("WarmupLR", "warmup_max_lr"),
        ("WarmupLR", "warmup_min_lr"),
        ("WarmupDecayLR", "total_num_steps"),
        ("WarmupCosineLR", "cos_min_ratio"),
    ],
)
def test_schedule_of_numbers_that_are_not_finite_is_refused_by_name(name, key, value):
    params = {**_NEEDED.get(name, {}), key: [value] if key == "warmup_min_lr" else value}
    with pytest.raises(ValueError, match=f"{key} must be a finite number"):
        SCHEDULERS[name](optimizer_of(0.9), **params)


def test_every_parameter_of_a_named_optimizer_or_schedule_has_its_type_and_range():
    schedules = [*SCHEDULERS.values(), *(getattr(lr_scheduler, name) for name in TORCH_BY_NAME)]
    for kind, known, others in (
        (OPTIMIZER_PARAMS, [getattr(torch.optim, n) for n in OPTIMIZERS], {"params"}),
        (SCHEDULER_PARAMS, schedules, {"optimizer", "scale_fn"}),  # no JSON
    ):
        for made in known:
            assert set(inspect.signature(made).parameters) - others <= set(kind.model_fields), made
