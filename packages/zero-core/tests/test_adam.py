"""Adam with and without bias correction, as an object and by the configuration."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero_core
from zero_core import ConfigError
from zero_core.optim.adam import Adam

LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.99), 1e-8, 0.1


def paper(start, grads, *, is_adamw, sign=1.0):
    """Adam's moments without their correction, in float64."""
    value = start.double()
    first = second = torch.zeros_like(value)
    for grad in grads:
        g = sign * grad.double()
        if is_adamw:
            value = value * (1 - LR * DECAY)
        else:
            g = g + DECAY * value
        first = BETAS[0] * first + (1 - BETAS[0]) * g
        second = BETAS[1] * second + (1 - BETAS[1]) * g * g
        value = value - LR * first / (second.sqrt() + EPS)
    return value


def stepped(optimizer, grads):
    (param,) = optimizer.param_groups[0]["params"]
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


def draw():
    torch.manual_seed(0)
    return torch.randn(13, 7), [torch.randn(13, 7) for _ in range(6)]


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("is_adamw", [False, True])
def test_without_bias_correction_the_moments_are_used_as_they_are(is_adamw, maximize):
    start, grads = draw()
    optimizer = Adam(
        [nn.Parameter(start.clone())],
        LR,
        BETAS,
        EPS,
        DECAY,
        bias_correction=False,
        decoupled_weight_decay=is_adamw,
        maximize=maximize,
    )
    expected = paper(start, grads, is_adamw=is_adamw, sign=-1.0 if maximize else 1.0)
    torch.testing.assert_close(stepped(optimizer, grads).double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("is_adamw", [False, True])
def test_with_bias_correction_it_is_torchs_bit_by_bit(is_adamw, fused):
    start, grads = draw()
    options = {"lr": LR, "betas": BETAS, "weight_decay": DECAY, "fused": fused}
    mine = Adam([nn.Parameter(start.clone())], decoupled_weight_decay=is_adamw, **options)
    kind = torch.optim.AdamW if is_adamw else torch.optim.Adam
    theirs = kind([nn.Parameter(start.clone())], foreach=False, **options)
    assert torch.equal(stepped(mine, grads), stepped(theirs, grads))
    (state,) = mine.state.values()
    assert float(state["step"]) == len(grads)


def test_hooks_of_a_step_run_once():
    start, grads = draw()
    torch.optim.AdamW([nn.Parameter(start.clone())])
    optimizer = Adam([nn.Parameter(start.clone())])
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    stepped(optimizer, grads[:1])
    assert calls == [1]


def build(params, kind="Adam"):
    torch.manual_seed(0)
    config = {"train_batch_size": 1, "optimizer": {"type": kind, "params": params}}
    return zero_core.build(nn.Linear(3, 2), config)


@pytest.mark.parametrize(("kind", "is_adamw"), [("Adam", True), ("AdamW", True), ("Adam", False)])
def test_configuration_turns_bias_correction_off(kind, is_adamw):
    params = {"lr": LR, "betas": list(BETAS), "weight_decay": DECAY, "bias_correction": False}
    engine = build({**params, "adam_w_mode": is_adamw}, kind)
    start = engine.full_state_dict()["weight"]
    batch = torch.randn(5, 3)
    grads = [2 * batch.sum(0).expand(2, 3) for _ in range(3)]
    for _ in grads:
        engine.backward(2 * engine(batch).sum())
        engine.step()
    found = engine.full_state_dict()["weight"].double()
    torch.testing.assert_close(found, paper(start, grads, is_adamw=is_adamw), rtol=0, atol=1e-6)


def test_keys_of_deepspeeds_adam_are_taken_or_refused():
    engine = build({"set_grad_none": True, "fp32_optimizer_states": True, "bias_correction": True})
    assert type(engine.optimizer.given) is torch.optim.AdamW
    with pytest.raises(ConfigError, match=r"fp32_optimizer_states = false is not served.*bfloat16"):
        build({"fp32_optimizer_states": False})
    build({"bias_correction": False, "amsgrad": False})
    with pytest.raises(ConfigError, match="bias_correction = false with amsgrad = true"):
        build({"bias_correction": False, "amsgrad": True})


@pytest.mark.parametrize(
    ("settings", "match"),
    [({"lr": -1.0}, "lr must not be negative"), ({"betas": (0.9, 1.0)}, r"betas\[1\] must be in")],
)
def test_settings_out_of_range_are_refused(settings, match):
    with pytest.raises(ValueError, match=match):
        Adam([nn.Parameter(torch.ones(1))], **settings)
