"""Named schedules: their closed forms, and refused settings."""

import inspect
import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from zero_core import parts
from zero_core.config.blocks import OPTIMIZER_PARAMS, SCHEDULER_PARAMS
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
LINEAR = {"warmup_type": "linear"}
LOG = [math.log(k + 1) / math.log(4) for k in range(4)]
COSINE = [0.2 + 0.8 * (1 + math.cos(math.pi * part / 4)) / 2 for part in (1, 2, 3, 4)]
RATIOS = {"cos_min_ratio": 0.2, "warmup_min_ratio": 0.5}
CURVES = {
    "linear warm-up reaches the top after its steps": (
        "WarmupLR",
        {"warmup_min_lr": 0.1, "warmup_num_steps": 4, **LINEAR},
        [[0.1, 0.1, 0.3, 0.5, 0.7, 0.9, 0.9, 0.9]],
    ),
    "every group has bounds of its own": (
        "WarmupLR",
        {"warmup_min_lr": [0.0, 1.0], "warmup_max_lr": [1.0, 3.0], "warmup_num_steps": 2, **LINEAR},
        [[0.0, 0.0, 0.5, 1.0, 1.0], [1.0, 1.0, 2.0, 3.0, 3.0]],
    ),
    # transformers' Trainer has 0 warm-up steps by default.
    "no warm-up is the shortest": ("WarmupLR", {"warmup_num_steps": 0}, [[0.0, 0.0, 0.9, 0.9]]),
    "a warm-up of 1 step is the shortest": (
        "WarmupLR",
        {"warmup_num_steps": 1},
        [[0.0, 0.0, 0.9, 0.9]],
    ),
    "an unknown warm-up is logarithmic": (
        "WarmupLR",
        {"warmup_num_steps": 4, "warmup_type": "cubic"},
        [[0.0, *(0.9 * part for part in LOG), 0.9, 0.9]],
    ),
    "logarithmic warm-up decays to the bottom": (
        "WarmupDecayLR",
        {"total_num_steps": 8, "warmup_max_lr": 1.0, "warmup_num_steps": 4},
        [[0.0, *LOG, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]],
    ),
    "cosine ends at its smallest ratio": (
        "WarmupCosineLR",
        {"total_num_steps": 6, "warmup_num_steps": 2, **RATIOS, **LINEAR},
        [[0.9 * part for part in (0.0, 0.5, 0.75, *COSINE, 0.2, 0.2)]],
    ),
}


def optimizer_of(*rates):
    return torch.optim.AdamW(
        [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    )


@pytest.mark.parametrize(("name", "params", "expected"), CURVES.values(), ids=CURVES)
def test_rates_are_those_of_the_closed_form(name, params, expected, caplog):
    optimizer = optimizer_of(*(0.9 for _ in expected))
    schedule, found = make_scheduler(optimizer, name, params), []
    assert caplog.text.count("warmup_type = 'cubic' is neither") == ("cubic" in params.values())
    for step, _ in enumerate(expected[0]):
        found.append([group["lr"] for group in optimizer.param_groups])
        assert schedule.get_last_lr() == found[-1]
        if step == 2:
            saved = optimizer.state_dict(), schedule.state_dict()
            optimizer = optimizer_of(*(0.9 for _ in expected))
            schedule = make_scheduler(optimizer, name, params)
            optimizer.load_state_dict(saved[0])
            schedule.load_state_dict(saved[1])
            assert schedule.get_last_lr() == found[-1]
        schedule.step()
    for rates, closed in zip(zip(*found, strict=True), expected, strict=True):
        assert rates == pytest.approx(closed, rel=1e-12, abs=1e-15)


def test_rate_stays_the_same_tensor():
    optimizer = optimizer_of(torch.tensor(0.5))
    rate = optimizer.param_groups[0]["lr"]
    schedule = make_scheduler(optimizer, "WarmupLR", {"warmup_num_steps": 2})
    assert float(rate) == 0.0
    schedule.step(7)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5


def test_schedule_goes_on_from_a_given_iteration():
    optimizer = optimizer_of(8.0)
    params = {"warmup_num_steps": 4, "last_batch_iteration": 1, **LINEAR}
    schedule = make_scheduler(optimizer, "WarmupLR", params)
    # keeps the rate, because loading a checkpoint sets it
    assert optimizer.param_groups[0]["lr"] == 8.0
    with pytest.raises(AssertionError, match=r"need to call step\(\) first"):
        schedule.get_last_lr()
    schedule.step()
    assert schedule.get_last_lr() == [4.0]


@pytest.mark.parametrize(("name", "params"), TORCH_BY_NAME.items())
def test_any_schedule_of_torch_is_made_by_its_name(name, params):
    theirs = getattr(lr_scheduler, name)(optimizer_of(0.3), **params)
    made = make_scheduler(optimizer_of(0.3), name, params)
    assert type(made) is type(theirs)
    assert made.state_dict() == theirs.state_dict()


@pytest.mark.parametrize(
    ("name", "params", "match"),
    [
        ("NoSuchLR", {}, "'NoSuchLR' is not served; known: .*'OneCycle'.*torch.optim.lr_scheduler"),
        *((name, {}, "is not served") for name in ("LRScheduler", "math")),
        ("LambdaLR", {}, "it takes functions"),
        ("ReduceLROnPlateau", {}, r"a measured value; make it over engine\.optimizer after build"),
        ("StepLR", {}, "step_size"),
        ("WarmupLR", {"warmup_num_steps": -1}, "warmup_num_steps must be a whole number >= 0"),
        ("WarmupLR", {"warmup_min_lr": [0, 0, 0]}, "warmup_min_lr: 3 values for 1 parameter"),
        ("WarmupLR", {"warmup_max_lr": math.nan}, "warmup_max_lr must be a finite number"),
        ("WarmupLR", {"warmup_min_lr": [math.inf]}, "warmup_min_lr must be a finite number"),
        ("WarmupDecayLR", {"total_num_steps": math.inf}, "total_num_steps must be a finite"),
        ("WarmupCosineLR", {"total_num_steps": 9, "cos_min_ratio": math.nan}, "cos_min_ratio must"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(name, params, match):
    with pytest.raises(ConfigError, match=match):
        make_scheduler(optimizer_of(0.1), name, params)


@pytest.mark.parametrize("name", ["OneCycle", "LRRangeTest"])
def test_a_schedule_of_zero_engine_is_refused_by_name_where_that_is_missing(name, monkeypatch):
    monkeypatch.setattr(parts, "entry_points", lambda **kwargs: ())
    monkeypatch.setattr(parts, "FOUND", {})
    found = rf"scheduler.type = '{name}' needs the package zero-parts.*pip install"
    with pytest.raises(MissingPartError, match=found):
        Case(top={"scheduler": {"type": name}}).build(model=make_tower())


def test_every_parameter_of_a_named_optimizer_or_schedule_has_its_type_and_range():
    kinds = [*SCHEDULERS.values(), *(getattr(lr_scheduler, name) for name in TORCH_BY_NAME)]
    for kind, known, others in (
        (OPTIMIZER_PARAMS, [getattr(torch.optim, n) for n in OPTIMIZERS], {"params"}),
        (SCHEDULER_PARAMS, kinds, {"optimizer", "scale_fn"}),  # excluded keys have no JSON form
    ):
        for made in known:
            assert set(inspect.signature(made).parameters) - others <= set(kind.model_fields), made
