"""Parameters that an autograd.Function saves after the context that gathered them has ended."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_core
from zero_core.core import access
from zero_core.testing import (
    Case,
    SimulatedRanks,
    on_ranks,
    seeded,
)


class _Distance(torch.autograd.Function):
    """The mean squared distance of two projections, which gathers a teacher's weight by itself."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: nn.Linear, weight: Tensor, teacher: Any) -> Tensor:
        with teacher.gathered(params=[weight]):
            gap = head(hidden) - hidden @ weight.t()
        ctx.save_for_backward(gap, weight)  # which torch does when this has returned
        ctx.own = head.weight.detach().clone()
        return gap.square().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        gap, weight = ctx.saved_tensors
        return grad * 2 / gap.numel() * gap @ (ctx.own - weight), None, None, None


class _Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 5, bias=False)
        self.head.weight.requires_grad_(False)

    def forward(self, x: Tensor, weight: Tensor, teacher: Any) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        if teacher is None:
            return (self.head(x) - x @ weight.t()).square().mean()
        return _Distance.apply(x, self.head, weight, teacher)


def _models() -> tuple[_Student, nn.Module]:
    with seeded(0):
        return _Student(), nn.Sequential(nn.Linear(3, 3), nn.Linear(6, 5, bias=False))


@on_ranks(2)
def test_a_parameter_saved_after_its_gather_is_gathered_in_backward(ranks: SimulatedRanks) -> None:
    expected, plain = _models()
    optimizer = torch.optim.SGD([p for p in expected.parameters() if p.requires_grad], lr=0.1)
    student, model = _models()
    config = Case(3, top={"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}).config()
    teacher = zero_core.build(model, config, process_group=ranks)
    engine = zero_core.build(student, config, process_group=ranks)
    weight = model[1].weight
    x = torch.linspace(-1, 1, 24).view(4, 6)
    for _ in range(2):
        optimizer.zero_grad()
        wanted = expected(x, plain[1].weight.detach(), None)
        wanted.backward()
        optimizer.step()
        loss = engine(x, weight, teacher)
        assert access.is_refused(weight)
        engine.backward(loss)
        assert access.is_refused(weight)
        engine.step()
        torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(engine.full_state_dict(), dict(expected.state_dict()))
    loss = engine(x, weight, teacher)
    with teacher.gathered(params=[weight], modifier_rank=0), torch.no_grad():
        weight.fill_(1.0)
    with pytest.raises(RuntimeError, match=r"shape \(5, 6\) has changed since"):
        engine.backward(loss)
    loss = engine(x, weight, teacher)
    engine.backward(loss)
    engine.step()
    assert access.is_refused(weight)
