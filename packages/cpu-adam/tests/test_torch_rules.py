"""Adagrad and SGD against torch.optim."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is an extra of cpu-adam")

import cpu_adam  # noqa: E402


def compare(make_optimizer, ours):
    """Take ten steps with both, compare the weights, and return torch's state."""
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(1000, generator=generator))
    master = param.detach().clone()
    optimizer = make_optimizer([param])
    for step in range(1, 11):
        param.grad = torch.randn(1000, generator=generator)
        optimizer.step()
        ours(master, param.grad, step)
    torch.testing.assert_close(master, param.detach(), rtol=1e-6, atol=1e-6)
    return optimizer.state[param]


@pytest.mark.parametrize("lr_decay", [0.0, 0.1])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adagrad_follows_torch(lr_decay, weight_decay):
    state_sum = torch.zeros(1000)
    options = {"lr": 0.1, "lr_decay": lr_decay, "weight_decay": weight_decay}
    state = compare(
        lambda params: torch.optim.Adagrad(params, foreach=False, **options),
        lambda p, g, step: cpu_adam.adagrad_step(p, g, state_sum, step=step, **options),
    )
    torch.testing.assert_close(state_sum, state["sum"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"),
    [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.3, False), (0.9, 0.0, True)],
)
def test_sgd_follows_torch(weight_decay, momentum, dampening, nesterov):
    buffer = torch.zeros(1000) if momentum else None
    options = {
        "lr": 0.1,
        "momentum": momentum,
        "dampening": dampening,
        "nesterov": nesterov,
        "weight_decay": weight_decay,
    }
    state = compare(
        lambda params: torch.optim.SGD(params, foreach=False, **options),
        lambda p, g, step: cpu_adam.sgd_step(p, g, buffer, step=step, **options),
    )
    if buffer is not None:
        torch.testing.assert_close(buffer, state["momentum_buffer"], rtol=1e-6, atol=1e-6)
