"""Lion: the paper's update, by name and as an object, at every stage."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zero_core
from zero_core import ConfigError, Lion

LR, BETAS, DECAY = 1e-2, (0.9, 0.99), 0.1


def paper(weights: torch.Tensor, grads: list[torch.Tensor], *, sign: float = 1.0) -> torch.Tensor:
    """Algorithm 2 of Chen et al., 2023, in float64."""
    value, momentum = weights.double(), torch.zeros_like(weights, dtype=torch.float64)
    for grad in grads:
        g = sign * grad.double()
        update = torch.sign(BETAS[0] * momentum + (1 - BETAS[0]) * g)
        value = value - LR * (update + DECAY * value)
        momentum = BETAS[1] * momentum + (1 - BETAS[1]) * g
    return value


@pytest.mark.parametrize("maximize", [False, True])
def test_update_is_that_of_the_paper(maximize):
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(13, 7))
    start, grads = param.detach().clone(), [torch.randn(13, 7) for _ in range(20)]
    optimizer = Lion([param], lr=LR, betas=BETAS, weight_decay=DECAY, maximize=maximize)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    expected = paper(start, grads, sign=-1.0 if maximize else 1.0)
    torch.testing.assert_close(param.double(), expected, rtol=0, atol=2e-6)
    assert set(optimizer.state[param]) == {"exp_avg"}


def test_parameter_without_a_gradient_is_left_alone():
    param = nn.Parameter(torch.ones(3))
    optimizer = Lion([param], weight_decay=0.5)
    optimizer.step()
    assert torch.equal(param, torch.ones(3))
    assert param not in optimizer.state


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"lr": -1.0}, "lr must not be negative, got -1.0"),
        ({"weight_decay": float("nan")}, "weight_decay must not be negative, got nan"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\] must be in \[0, 1\)"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\] must be in \[0, 1\)"),
    ],
)
def test_settings_out_of_range_are_refused(settings, match):
    with pytest.raises(ValueError, match=match):
        Lion([nn.Parameter(torch.ones(1))], **settings)


def test_sparse_gradients_are_refused():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse"):
        Lion(table.parameters()).step()


def _train(stage, name):
    torch.manual_seed(0)
    config = {
        "train_batch_size": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": name, "params": {"lr": LR, "betas": [0.9, 0.99]}},
    }
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))
    engine = zero_core.build(model, config)
    for _ in range(4):
        engine.backward(engine(torch.randn(4, 7)).square().mean())
        engine.step()
    return engine.full_state_dict()


def test_named_in_a_configuration_it_gives_the_same_bits_at_every_stage():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))
    optimizer = Lion(model.parameters(), lr=LR)
    for _ in range(4):
        model(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
        model.zero_grad()
    for stage in range(4):
        found = _train(stage, "LION")
        for name, value in model.state_dict().items():
            assert torch.equal(found[name], value), (stage, name)


def test_unknown_settings_of_it_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"optimizer\.params\.eps: unknown key; Lion takes"):
        zero_core.build(
            nn.Linear(2, 2),
            {"train_batch_size": 1, "optimizer": {"type": "Lion", "params": {"eps": 1e-8}}},
        )
