"""DeepSpeed's optimizers and schedules, compared with torch and closed forms."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from zero_engine.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from zero_engine.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from zero_engine.deepspeed.ops.lamb import FusedLamb
from zero_engine.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

import zero_core
from tests.support import facade
from tests.support.facade import HOST, config, make, net
from zero_core import ConfigError
from zero_core.optim.adam import Adam
from zero_core.schedules import make_scheduler
from zero_core.testing import batch, make_model, train
from zero_engine.deepspeed.errors import NotServedError
from zero_engine.deepspeed.lr_schedules import LRRangeTest, OneCycle
from zero_engine.deepspeed.ops import __compatible_ops__
from zero_engine.deepspeed.ops.op_builder import CPUAdamBuilder, FusedLambBuilder

STEPS = 3
WD = {"weight_decay": 0.1}
MOMENTUM = {"lr": 0.05, "momentum": 0.9, **WD}
PLAIN, DECOUPLED = {**WD, "bias_correction": False}, {"decoupled_weight_decay": True}
ADAMW = (torch.optim.AdamW, {"weight_decay": 0.1})
LION = (zero_core.Lion, {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.1})
PAIRS: dict[str, tuple[Any, dict[str, Any], Any, dict[str, Any]]] = {
    "DeepSpeedCPUAdam": (DeepSpeedCPUAdam, WD, *ADAMW),
    "DeepSpeedCPUAdam, L2": (DeepSpeedCPUAdam, {**WD, "adamw_mode": False}, torch.optim.Adam, WD),
    "FusedAdam": (FusedAdam, WD, *ADAMW),
    "FusedAdam, L2": (FusedAdam, {**WD, "adam_w_mode": False}, torch.optim.Adam, WD),
    "DeepSpeedCPUAdam, uncorrected": (DeepSpeedCPUAdam, PLAIN, Adam, {**PLAIN, **DECOUPLED}),
    "FusedAdam, uncorrected": (FusedAdam, PLAIN, Adam, {**PLAIN, **DECOUPLED}),
    "DeepSpeedCPUAdagrad": (DeepSpeedCPUAdagrad, WD, torch.optim.Adagrad, WD),
    "DeepSpeedCPULion": (DeepSpeedCPULion, WD, *LION),
    "FusedLion": (FusedLion, WD, *LION),
    "SGD": (torch.optim.SGD, MOMENTUM, torch.optim.SGD, MOMENTUM),
}


def _losses(
    rank: int, settings: dict[str, Any], kind: Any = None, **options: Any
) -> tuple[list[float], Any]:
    model = make_model()
    trained = [p for p in model.parameters() if p.requires_grad]
    settings = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, **settings}
    given = kind(trained, **options) if kind else None
    engine = zero_core.build(model, settings, optimizer=given)
    return train(engine, [batch(step, 0, rank) for step in range(STEPS)]), engine


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_on_the_device_and_on_the_hosts_kernel_losses_are_torchs(name: str) -> None:
    kind, options, other, its = PAIRS[name]
    config = {"zero_optimization": {"stage": 2, **HOST}}
    found, engine = _losses(0, config, kind, **options)
    assert {part.tier.has_kernel for part in engine.sharded_state.tier.report()} == {True}
    expected, _ = _losses(0, {"zero_optimization": {"stage": 2}}, other, **its)
    assert found == pytest.approx(expected, rel=1e-5)
    on_device, _ = _losses(0, {"zero_optimization": {"stage": 3}}, kind, **options)
    assert on_device == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("zero", [{}, HOST], ids=["device", "host"])
def test_configuration_may_turn_bias_correction_off(zero: dict[str, Any]) -> None:
    params = {"lr": 1e-3, "bias_correction": False, "weight_decay": 0.1}
    named = {"optimizer": {"type": "AdamW", "params": params}}
    found, _ = _losses(0, {"zero_optimization": {"stage": 1, **zero}, **named})
    given, _ = _losses(0, {"zero_optimization": {"stage": 1}}, DeepSpeedCPUAdam, **params)
    assert found == pytest.approx(given, rel=1e-5)
    corrected, _ = _losses(0, {"zero_optimization": {"stage": 1}}, FusedAdam, **WD)
    assert found != pytest.approx(corrected, rel=1e-4)


def test_groups_are_shared_with_the_optimizer_they_came_from() -> None:
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    given = torch.optim.AdamW([{"params": [p], "lr": 0.1 + i} for i, p in enumerate(params)])
    made = DeepSpeedCPUAdam(given.param_groups, lr=0.5, adamw_mode=False)
    schedule = torch.optim.lr_scheduler.StepLR(given, 1, gamma=0.5)
    for param in params:
        param.grad = torch.ones_like(param)
    made.step()
    given.step()
    schedule.step()
    assert [group["lr"] for group in made.param_groups] == [0.05, 0.55]
    assert not made.param_groups[0]["decoupled_weight_decay"]


def test_parameters_may_be_elsewhere_until_stepped_and_gradients_kept() -> None:
    optimizer = DeepSpeedCPUAdam([nn.Parameter(torch.ones(2, device="meta"))])
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match="meta"):
        optimizer.step()
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    FusedLion([param], set_grad_none=False).zero_grad()
    assert torch.equal(param.grad, torch.zeros(2))
    FusedAdam([param]).zero_grad()
    assert param.grad is None


def test_what_is_not_served_is_refused_with_a_reason() -> None:
    params = [nn.Parameter(torch.ones(2))]
    for kind in (DeepSpeedCPUAdam, FusedAdam, DeepSpeedCPUAdagrad):
        with pytest.raises(RuntimeError, match="does not support the AMSGrad variant"):
            kind(params, amsgrad=True)
    for kind in (DeepSpeedCPUAdagrad, DeepSpeedCPULion):
        with pytest.raises(ValueError, match=r'fp32_optimizer_states=False .* "bfloat16"'):
            kind(params, fp32_optimizer_states=False)
    with pytest.raises(NotServedError, match="norm of whole parameters"):
        FusedLamb(params)
    with pytest.raises(NotServedError, match="FusedLambBuilder"):
        FusedLambBuilder().load()
    group = {"params": params, "eps": (1e-30, 1e-3)}  # of Adafactor, as accelerate passes it
    with pytest.raises(ValueError, match='"zero_force_ds_cpu_optimizer": false'):
        DeepSpeedCPUAdam([group])
    assert CPUAdamBuilder().load().adam_step is not None
    assert __compatible_ops__["cpu_adam"]
    assert not __compatible_ops__["fused_lamb"]


def test_optimizer_of_ones_own_is_refused_where_untested_ones_are() -> None:
    model = net()
    own = type("Own", (torch.optim.SGD,), {})(model.parameters(), lr=0.1)
    make(model, optimizer=own, config=config(3)).destroy()
    settings = config(3, zero_allow_untested_optimizer=False)
    with pytest.raises(ConfigError, match="zero_allow_untested_optimizer is false, and"):
        make(model, optimizer=own, config=settings)


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
        if step == 3:
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


def test_engine_trains_with_one_cycle_as_torch_does_with_the_same_rates(tmp_path):
    params = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-1, "cycle_first_step_size": 3}
    config = facade.config(scheduler={"type": "OneCycle", "params": params})
    engine, resumed, plain = facade.make(config=config), facade.make(config=config), facade.net()
    optimizer = facade.adamw(plain, fused=True)
    # The rate is a triangle, then constant. beta1 mirrors the rate and starts at 0.8.
    parts = [0.0, 1 / 3, 2 / 3, 1.0, 2 / 3, 1 / 3, 0.0, 0.0]
    momenta = [0.8, *(0.9 - 0.1 * part for part in parts[1:])]
    for step, (part, beta1) in enumerate(zip(parts, momenta, strict=True)):
        rate = 1e-3 + (1e-1 - 1e-3) * part
        optimizer.param_groups[0] |= {"lr": rate, "betas": (beta1, 0.99)}
        facade.add_gradients(plain, step, 1)
        facade.update(optimizer)
        if step == 4:
            engine.save_checkpoint(tmp_path)
            # The schedule's state sets rates and momenta, even without the optimizer's groups.
            for option in ({"load_optimizer_states": False}, {}):
                resumed.load_checkpoint(tmp_path, **option)
                saved, found = (one.optimizer.param_groups[0] for one in (engine, resumed))
                assert (found["lr"], found["betas"]) == (saved["lr"], saved["betas"])
            engine = resumed
        facade.train(engine, 1, step)
    facade.check_values(engine, plain)
