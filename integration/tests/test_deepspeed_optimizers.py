"""DeepSpeed's optimizer classes: updates of torch's, alone, in the engine and on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from zero_engine.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from zero_engine.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from zero_engine.deepspeed.ops.lamb import FusedLamb
from zero_engine.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

import zero_core
from tests.support.facade import HOST, config, inputs, make, net, on_ranks, square, update
from zero_core.testing import batch, make_model, train
from zero_engine import deepspeed
from zero_engine.deepspeed.errors import NotServedError
from zero_engine.deepspeed.ops import __compatible_ops__
from zero_engine.deepspeed.ops.op_builder import CPUAdamBuilder, FusedLambBuilder
from zero_engine.deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

STEPS = 4
WD = {"weight_decay": 0.1}
ADAMW = (torch.optim.AdamW, {"weight_decay": 0.1})
LION = (zero_core.Lion, {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.1})
PAIRS: dict[str, tuple[Any, dict[str, Any], Any, dict[str, Any]]] = {
    "DeepSpeedCPUAdam": (DeepSpeedCPUAdam, WD, *ADAMW),
    "DeepSpeedCPUAdam, L2": (DeepSpeedCPUAdam, {**WD, "adamw_mode": False}, torch.optim.Adam, WD),
    "FusedAdam": (FusedAdam, WD, *ADAMW),
    "FusedAdam, L2": (FusedAdam, {**WD, "adam_w_mode": False}, torch.optim.Adam, WD),
    "DeepSpeedCPUAdagrad": (DeepSpeedCPUAdagrad, WD, torch.optim.Adagrad, WD),
    "DeepSpeedCPULion": (DeepSpeedCPULion, WD, *LION),
    "FusedLion": (FusedLion, WD, *LION),
}


def uncorrected(start: torch.Tensor, grads: list[torch.Tensor], *, is_adamw: bool) -> torch.Tensor:
    """Adam without bias correction, as the papers write it, in float64."""
    value = start.double()
    first = second = torch.zeros_like(value)
    for grad in grads:
        g = grad.double() + (0.0 if is_adamw else 0.1 * value)
        value = value * (1 - 1e-3 * 0.1) if is_adamw else value
        first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g * g
        value = value - 1e-3 * first / (second.sqrt() + 1e-8)
    return value


def stepped(optimizer: torch.optim.Optimizer, grads: list[torch.Tensor]) -> torch.Tensor:
    (param,) = optimizer.param_groups[0]["params"]
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    result: torch.Tensor = param.detach()
    return result


def grads_of(shape: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape) for _ in range(STEPS)]


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_alone_the_update_is_the_other_optimizers(name: str) -> None:
    kind, options, other, its = PAIRS[name]
    start, grads = torch.randn(7, 3), grads_of((7, 3))
    found = stepped(kind([nn.Parameter(start.clone())], **options), grads)
    expected = stepped(other([nn.Parameter(start.clone())], **its), grads)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(found, start, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", [DeepSpeedCPUAdam, FusedAdam])
@pytest.mark.parametrize("is_adamw", [True, False])
def test_bias_correction_can_be_off(kind: Any, is_adamw: bool) -> None:
    mode = "adamw_mode" if kind is DeepSpeedCPUAdam else "adam_w_mode"
    start, grads = torch.randn(7, 3), grads_of((7, 3))
    options = {mode: is_adamw, "bias_correction": False, "weight_decay": 0.1}
    found = stepped(kind([nn.Parameter(start.clone())], **options), grads)
    expected = uncorrected(start, grads, is_adamw=is_adamw)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)
    corrected = stepped(kind([nn.Parameter(start.clone())], **{mode: is_adamw}, **WD), grads)
    assert not torch.allclose(found, corrected, rtol=0, atol=1e-3)


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


def test_parameters_may_be_elsewhere_until_they_are_stepped() -> None:
    optimizer = DeepSpeedCPUAdam([nn.Parameter(torch.ones(2, device="meta"))])
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match="meta"):
        optimizer.step()


def test_gradients_are_kept_if_set_grad_none_is_off() -> None:
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
    group = {"params": params, "eps": (1e-30, 1e-3)}  # as accelerate passes Adafactor's on
    with pytest.raises(ValueError, match='"zero_force_ds_cpu_optimizer": false'):
        DeepSpeedCPUAdam([group])
    assert CPUAdamBuilder().load().adam_step is not None
    assert __compatible_ops__["cpu_adam"]
    assert not __compatible_ops__["fused_lamb"]


class Normed(torch.optim.Optimizer):
    """An optimizer of a user's own, that needs whole parameters."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    average = self.state[param].setdefault("average", torch.zeros_like(param))
                    average.lerp_(param.grad, 0.1)
                    param.sub_(average / (average.norm() + 1e-6), alpha=group["lr"])


def _whole(rank: int, world_size: int) -> None:
    plain = net()
    theirs = Normed(plain.parameters())
    for _ in range(STEPS):  # the same inputs on all ranks: their mean is one rank's gradient
        square(plain, inputs(0)).backward()
        update(theirs)
    for more in ({}, {"zero_allow_untested_optimizer": True}):
        model = net()
        given = Normed(model.parameters())
        settings = {k: v for k, v in config(3, **more).items() if k != "optimizer"}
        engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=given, config=settings)
        for _ in range(STEPS):
            engine.backward(square(engine, inputs(0)))
            engine.step()
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            state = safe_get_full_optimizer_state(param, "average")
            assert torch.equal(state, theirs.state[expected]["average"])
            assert torch.equal(safe_get_full_fp32_param(param), expected)
            if param in optimizer.state and "average" in optimizer.state[param]:
                assert optimizer.state[param]["average"].shape == expected.shape
        engine.destroy()
    forbidden = {**settings, "zero_allow_untested_optimizer": False}
    with pytest.raises(zero_core.ConfigError, match="zero_allow_untested_optimizer is false, and"):
        make(plain, optimizer=theirs, config=forbidden)


def test_optimizer_of_ones_own_updates_whole_parameters() -> None:
    on_ranks(2, [_whole])
