"""Blocks may take and return dicts, tuples, dataclasses and None, at any precision."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import zero_core
from zero_core.testing import LR, WEIGHT_DECAY, Case, SimulatedDDP, SimulatedRanks, seeded, simulate


@dataclass
class _State:
    hidden: Tensor
    extra: Tensor | None


class _Start(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7)

    def forward(self, batch: dict[str, Tensor], mask: None = None) -> _State:
        assert mask is None
        return _State(self.linear(batch["x"]), None)


class _Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)

    def forward(self, state: _State) -> tuple[Tensor, dict[str, Tensor], None]:
        hidden = torch.tanh(self.linear(state.hidden))
        return hidden, {"unused": hidden * 2}, None


class _End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 3)

    def forward(self, parts: tuple[Tensor, dict[str, Tensor], None], *, scale: float) -> _State:
        hidden, extras, nothing = parts
        assert nothing is None
        return _State(self.linear(hidden) * scale, extras["unused"])


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with seeded(2):
            self.blocks = nn.ModuleList([_Start(), _Middle(), _End()])

    def forward(self, batch: dict[str, Tensor]) -> _State:
        start, middle, end = self.blocks
        return end(middle(start(batch)), scale=0.5)


def _batch(step: int, rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return {"x": torch.randn(4, 5, generator=generator, dtype=dtype)}


def _reference(ranks: SimulatedRanks, dtype: torch.dtype) -> dict[str, Tensor]:
    model = _Net().to(dtype)
    ddp = SimulatedDDP(model, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    for step in range(3):
        optimizer.zero_grad()
        ddp(_batch(step, ranks.rank, dtype)).hidden.square().mean().backward()
        ddp.average_gradients()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _follows_ddp(ranks: SimulatedRanks, dtype: torch.dtype, stage: int) -> None:
    expected = _reference(ranks, dtype)
    for again in (None, {}):
        config = Case(stage=stage).config() | {"activation_checkpointing": again}
        engine = zero_core.build(_Net().to(dtype), config, process_group=ranks)
        for step in range(3):
            out = engine(_batch(step, ranks.rank, dtype))
            assert isinstance(out, _State)
            assert out.extra is not None  # an output that no loss uses
            engine.backward(out.hidden.square().mean())
            engine.step()
        torch.testing.assert_close(engine.full_state_dict(), expected, rtol=0.0, atol=0.0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_structured_values_pass_through_blocks_as_in_ddp(world_size, dtype, stage):
    simulate(_follows_ddp, world_size, dtype, stage)
