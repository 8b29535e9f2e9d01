"""OneCycle and LRRangeTest: the closed forms of their curves, and their places in a training."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import nn

from tests.support import facade
from zero_core import ConfigError
from zero_core.config.params import SCHEDULER_PARAMS
from zero_core.schedules import make_scheduler
from zero_engine.deepspeed.lr_schedules import LRRangeTest, OneCycle

BOUNDS = {"cycle_min_lr": 1.0, "cycle_max_lr": 3.0}
CYCLE = {**BOUNDS, "cycle_first_step_size": 4}
STAIRS = {"cycle_first_stair_count": 2, "cycle_second_stair_count": 1, "cycle_momentum": False}
DECAY = {"cycle_second_step_size": 2, "decay_step_size": 2, "decay_lr_rate": 1.0}
RANGE = {"lr_range_test_min_lr": 1.0, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 2.0}
CURVES = {
    "one cycle goes up and down and then decays, momentum against it": (
        OneCycle,
        {**CYCLE, **DECAY, "decay_mom_rate": 0.2},
        [1.0, 1.5, 2.0, 2.5, 3.0, 2.0, 1.0, 1 / 1.5, 1 / 2.0, 1 / 2.5],
        [0.8, 0.875, 0.85, 0.825, 0.8, 0.85, 0.9, 0.99, 1.08, 1.17],
    ),
    "one cycle climbs stairs": (
        OneCycle,
        {**CYCLE, **STAIRS},
        [1.0, 1.0, 2.0, 2.0, 3.0, 1.0, 1.0, 1.0, 1.0],
        [0.9] * 9,
    ),
    "range test goes up without end": (LRRangeTest, RANGE, [1.0, 2.0, 3.0, 4.0, 5.0], [0.9] * 5),
    "range test climbs stairs": (
        LRRangeTest,
        {**RANGE, "lr_range_test_staircase": True},
        [1.0, 1.0, 3.0, 3.0, 5.0],
        [0.9] * 5,
    ),
}


def optimizer_of(kind=torch.optim.AdamW):
    return kind([nn.Parameter(torch.zeros(1))], lr=0.5)


@pytest.mark.parametrize(("kind", "params", "rates", "momenta"), CURVES.values(), ids=CURVES)
def test_rates_and_momenta_are_those_of_the_closed_form(kind, params, rates, momenta):
    optimizer = optimizer_of()
    schedule, group, found = kind(optimizer, **params), optimizer.param_groups[0], []
    for step in range(len(rates)):
        found.append((group["lr"], group["betas"][0]))
        if step == 3:  # a loaded one continues the curve
            state, schedule = schedule.state_dict(), kind(optimizer, **params)
            schedule.load_state_dict(state)
        schedule.step()
        assert schedule.get_last_lr() == [group["lr"]]
    assert [list(values) for values in zip(*found, strict=True)] == [
        pytest.approx(rates),
        pytest.approx(momenta),
    ]


def test_one_cycle_without_betas_leaves_momentum_and_says_so(caplog):
    optimizer = optimizer_of(torch.optim.SGD)
    schedule = OneCycle(optimizer, 0.0, 1.0)
    schedule.step()
    assert "SGD has no betas" in caplog.text
    assert optimizer.param_groups[0]["momentum"] == 0
    assert schedule.get_mom() is None


@pytest.mark.parametrize(
    ("name", "params", "match"),
    [
        ("OneCycle", {"cycle_min_lr": 1}, "cycle_max_lr"),
        ("OneCycle", {**BOUNDS, "cycle_first_step_size": 0}, "cycle_first_step_size must be pos"),
        ("OneCycle", {**BOUNDS, "cycle_max_lr": math.nan}, "cycle_max_lr must be a finite number"),
        ("OneCycle", {**BOUNDS, "decay_mom_rate": math.inf}, "decay_mom_rate must be a finite"),
        ("LRRangeTest", {"lr_range_test_step_size": 2.5}, "lr_range_test_step_size must be a whol"),
        ("LRRangeTest", {"lr_range_test_step_rate": math.nan}, "lr_range_test_step_rate must be a"),
    ],
)
def test_what_cannot_be_made_is_refused_by_name(name, params, match):
    with pytest.raises(ConfigError, match=match):
        make_scheduler(optimizer_of(), name, params)


@pytest.mark.parametrize("kind", [OneCycle, LRRangeTest])
def test_every_parameter_has_its_type_and_range(kind):
    assert {*inspect.signature(kind).parameters} <= {"optimizer", *SCHEDULER_PARAMS.model_fields}


def test_engine_trains_with_one_cycle_as_torch_does_with_the_same_rates(tmp_path):
    params = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-1, "cycle_first_step_size": 3}
    config = facade.config(scheduler={"type": "OneCycle", "params": params})
    engine, resumed, plain = facade.make(config=config), facade.make(config=config), facade.net()
    optimizer = facade.adamw(plain, fused=True)
    # The closed form: a triangle, then flat; beta1 against it, 0.8 at the very first step.
    parts = [0.0, 1 / 3, 2 / 3, 1.0, 2 / 3, 1 / 3, 0.0, 0.0]
    momenta = [0.8, *(0.9 - 0.1 * part for part in parts[1:])]
    for step, (part, beta1) in enumerate(zip(parts, momenta, strict=True)):
        rate = 1e-3 + (1e-1 - 1e-3) * part
        optimizer.param_groups[0] |= {"lr": rate, "betas": (beta1, 0.99)}
        facade.add_gradients(plain, step, 1)
        facade.update(optimizer)
        if step == 4:
            engine.save_checkpoint(tmp_path)
            # The schedule alone sets rates and momenta, and the optimizer's groups have them too.
            for option in ({"load_optimizer_states": False}, {}):
                resumed.load_checkpoint(tmp_path, **option)
                saved, found = (one.optimizer.param_groups[0] for one in (engine, resumed))
                assert (found["lr"], found["betas"]) == (saved["lr"], saved["betas"])
            engine = resumed
        facade.train(engine, 1, step)
    facade.check_values(engine, plain)
