"""Gradients of gradients (``create_graph=True``) are right at every stage, whatever is released."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_core
from zero_core.testing import Case, spawn

STAGES = (0, 1, 2, 3)
STEPS = 3
OPT: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}}


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(5)
        )
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).sigmoid()
        return self.last(x)


def _x(step: int, rank: int) -> Tensor:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    return x.requires_grad_()


def _penalized(model: Any, x: Tensor) -> Tensor:
    """A loss with a gradient penalty (Gulrajani et al., arXiv 1704.00028)."""
    out = model(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + (grad.norm(dim=1) - 1.0).square().mean()


def _twice_penalized(model: Any, x: Tensor) -> Tensor:
    out = model(x)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), x, create_graph=True)
    return out.mean() + grad.square().mean() + second.square().mean()


LOSSES = {"penalty": _penalized, "third order": _twice_penalized}


def _reference(which: str, rank: int, world_size: int) -> tuple[list[float], dict[str, Tensor]]:
    model = _Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = LOSSES[which](model, _x(step, rank))
        loss.backward()
        losses.append(loss.item())
        for param in model.parameters():
            param.grad /= world_size
            if world_size > 1:
                dist.all_reduce(param.grad)
        optimizer.step()
    return losses, {k: v.detach() for k, v in model.state_dict().items()}


def _follows(rank: int, world_size: int, which: str) -> None:
    losses, values = _reference(which, rank, world_size)
    atol = 0.0 if world_size <= 2 else 2e-5
    for stage in STAGES:
        engine = zero_core.build(_Net(), Case(stage).config() | OPT)
        found = []
        for step in range(STEPS):
            loss = LOSSES[which](engine, _x(step, rank))
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        torch.testing.assert_close(found, losses, rtol=0.0, atol=atol)
        torch.testing.assert_close(engine.full_state_dict(), values, rtol=0.0, atol=atol)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("which", LOSSES)
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_gradient_penalty_follows_torch_at_every_stage(world_size, which):
    spawn(_follows, world_size, which)
