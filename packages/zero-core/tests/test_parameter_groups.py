"""Optimizer groups with settings of their own, schedules over them, groups without parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import zero_core
from zero_core.testing import Case, SimulatedDDP, SimulatedRanks, seeded, simulate


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with seeded(6):
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 5)) for _ in range(2)
            )
            self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


def _optimizer(model: nn.Module, *, begins_empty: bool) -> torch.optim.Optimizer:
    decay = [p for p in model.blocks.parameters() if p.ndim > 1]
    rest = [p for p in model.blocks.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [
        {"params": decay, "weight_decay": 0.3, "lr": 2e-2},
        {"params": [], "lr": 5.0},
        {"params": rest, "weight_decay": 0.0},
        {"params": model.head.parameters(), "lr": 1e-3, "betas": (0.5, 0.8)},
    ]
    if begins_empty:
        groups[0], groups[1] = groups[1], groups[0]
    return torch.optim.AdamW(groups, lr=1e-2)


def _schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
    factors = [lambda step, i=i: 1.0 / (1 + i * step) for i in range(4)]
    return LambdaLR(optimizer, factors)


def _x(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def _follows_ddp(ranks: SimulatedRanks) -> None:
    for begins_empty in (False, True):
        model = _Net()
        ddp = SimulatedDDP(model, ranks)
        optimizer = _optimizer(model, begins_empty=begins_empty)
        schedule = _schedule(optimizer)
        for step in range(4):
            optimizer.zero_grad()
            ddp(_x(step, ranks.rank)).backward()
            ddp.average_gradients()
            optimizer.step()
            schedule.step()
        expected = {name: value.detach() for name, value in model.state_dict().items()}
        for stage in (0, 1, 2, 3):
            model = _Net()
            given = _optimizer(model, begins_empty=begins_empty)
            engine = zero_core.build(
                model,
                Case(stage).config(),
                optimizer=given,
                lr_scheduler=_schedule(given),
                process_group=ranks,
            )
            seen: list[str] = []
            engine.optimizer.register_step_pre_hook(lambda *_, seen=seen: seen.append("before"))
            engine.optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append("after"))
            for step in range(4):
                engine.backward(engine(_x(step, ranks.rank)))
                engine.step()
            assert seen == ["before", "after"] * 4
            found = [group["lr"] for group in engine.optimizer.param_groups]
            assert found == [group["lr"] for group in optimizer.param_groups]
            torch.testing.assert_close(engine.full_state_dict(), expected, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_groups_schedules_and_empty_groups_follow_ddp(world_size):
    simulate(_follows_ddp, world_size)
