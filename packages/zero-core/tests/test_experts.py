"""Mixtures of experts without a leaf list: ranks route differently and gather all experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_core
from zero_core.layout.discovery import discover
from zero_core.testing import SimulatedDDP, SimulatedRanks, seeded, simulate
from zero_core.testing.models import MIXTURE_WIDTH, Mixture, MixtureModel, routed_batch

ADAMW = {"lr": 1e-2, "weight_decay": 0.01}


class _Alone(nn.Module):
    """A list of experts that is in no block."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(3):
            self.mixture = Mixture()
            self.blocks = nn.ModuleList(nn.Linear(MIXTURE_WIDTH, MIXTURE_WIDTH) for _ in range(2))

    def forward(self, x: Tensor, allowed: list[list[int]]) -> Tensor:
        x = self.mixture(x, allowed[0])
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


class _AtRoot(Mixture):
    """A list of experts directly under the root."""

    def __init__(self) -> None:
        with seeded(3):
            super().__init__()

    def forward(self, x: Tensor, allowed: list[list[int]]) -> Tensor:
        return super().forward(x, allowed[0]).square().mean()


def _config(stage: int, **top: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        **top,
    }


def _follow(
    ranks: SimulatedRanks,
    kind: type[nn.Module],
    stage: int,
    num_allowed: list[int],
    top: dict[str, Any],
) -> None:
    """Compare with DDP."""
    model = kind()
    ddp = SimulatedDDP(model, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    micros = int(top.get("gradient_accumulation_steps", 1))
    losses: list[Tensor] = []
    for step, num in enumerate(num_allowed):
        sums: dict[nn.Parameter, Tensor] = {}
        for micro in range(micros):
            loss = ddp(*routed_batch(10 * step + micro, ranks.rank, num))
            (loss / micros).backward()
            ddp.average_gradients()
            losses.append(loss.detach())
            for param in model.parameters():
                if param.grad is not None:
                    grad, param.grad = param.grad, None
                    sums[param] = sums[param] + grad if param in sums else grad
        for param in model.parameters():
            param.grad = sums.get(param)
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: value.detach() for name, value in model.state_dict().items()}

    engine = zero_core.build(kind(), _config(stage, **top), process_group=ranks)
    found = []
    for step, num in enumerate(num_allowed):
        for micro in range(micros):
            inputs = routed_batch(10 * step + micro, ranks.rank, num)
            if step < 3:
                with torch.no_grad():
                    engine(*inputs)  # an evaluation, which routes as well
            loss = engine(*inputs)
            found.append(loss.detach())
            engine.backward(loss)
            engine.step()
    assert torch.equal(torch.stack(found), torch.stack(losses))
    torch.testing.assert_close(engine.full_state_dict(), expected, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("kind", [MixtureModel, _Alone, _AtRoot])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_route_differently_follow_ddp(stage, kind):
    simulate(_follow, 3, kind, stage, [8, 1, 2], {})


@pytest.mark.parametrize(
    "top",
    [{"gradient_accumulation_steps": 2}, {"activation_checkpointing": {}}],
    ids=["accumulated", "recomputed"],
)
def test_ranks_that_leave_mixtures_out_follow_ddp(top):
    simulate(_follow, 2, MixtureModel, 3, [8, 1, 0, 8], top)  # experts that tokens may go to


def test_a_list_of_experts_that_is_in_no_block_makes_its_holder_one():
    engine = zero_core.build(_Alone(), _config(3))
    assert [unit.name for unit in engine.layout.units] == ["", "mixture", "blocks.0", "blocks.1"]


def test_layers_of_an_expert_are_blocks():
    model = nn.Module()
    model.action_expert_layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
    found = discover(model)
    assert [name for name, _, _ in found.units] == [
        "",
        "action_expert_layers.0",
        "action_expert_layers.1",
    ]
