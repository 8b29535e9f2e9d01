"""Parameters of several dtypes in one model each keep master weights and states of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_core
from zero_core.testing import (
    LR,
    WEIGHT_DECAY,
    Case,
    SimulatedRanks,
    on_ranks,
    seeded,
    train,
)

STEPS = 3
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=WEIGHT_DECAY, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=LR),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=LR),
}
MIXES = {
    "fp32 first": (torch.float32, torch.float64),
    "fp64 first": (torch.float64, torch.float32),
    "fp64 and bf16": (torch.float64, torch.bfloat16),
    "fp32 and bf16": (torch.float32, torch.bfloat16),
    "fp16, fp64 and fp32": (torch.float16, torch.float64, torch.float32),
}


class _Mixed(nn.Module):
    """Blocks of a linear map per dtype, and a root of both; the last dtype has one scalar more."""

    def __init__(self, dtypes: tuple[torch.dtype, ...], depth: int = 2) -> None:
        super().__init__()
        with seeded(0):
            self.first = nn.Linear(5, 5).to(dtypes[0])
            self.blocks = nn.ModuleList(
                nn.ModuleList(nn.Linear(5, 5).to(dtype) for dtype in dtypes) for _ in range(depth)
            )
            self.gain = nn.Parameter(torch.ones((), dtype=dtypes[-1]))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, *(layer for block in self.blocks for layer in block)):
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return (x * self.gain).double().square().mean()


def _x(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 5, generator=generator)


def _wide(param: Tensor) -> Tensor:
    return param.detach().clone().to(torch.promote_types(param.dtype, torch.float32))


def _reference(mix: str, name: str, ranks: SimulatedRanks) -> tuple[list[float], Any]:
    """Train with torch alone; where parameters have 16 bits, sums and masters are fp32."""
    control = ranks.connect()
    model = _Mixed(MIXES[mix])
    masters = {n: nn.Parameter(_wide(p)) for n, p in model.named_parameters()}
    optimizer = OPTIMIZERS[name](list(masters.values()))
    params = dict(model.named_parameters())
    losses = []
    for step in range(STEPS):
        loss = model(_x(step, ranks.rank))
        loss.backward()
        losses.append(loss.item())
        for key, param in params.items():
            masters[key].grad = control.sum(_wide(param.grad) / ranks.size)
            param.grad = None
        optimizer.step()
        with torch.no_grad():
            for key, param in params.items():
                param.copy_(masters[key])
    return losses, (masters, optimizer)


def _engine(mix: str, name: str, stage: int, process_group: SimulatedRanks) -> zero_core.Engine:
    model = _Mixed(MIXES[mix])
    config = {k: v for k, v in Case(stage).config().items() if k != "optimizer"}
    optimizer = OPTIMIZERS[name](model.parameters())
    return zero_core.build(model, config, optimizer=optimizer, process_group=process_group)


def _run(engine: zero_core.Engine, rank: int, steps: range) -> list[float]:
    return train(engine, [_x(step, rank) for step in steps])


def _compare(engine: zero_core.Engine, masters: Any, optimizer: Any, atol: float) -> None:
    for name, master in masters.items():
        expected = {"master_weight": master.detach()} | {
            key: value
            for key, value in optimizer.state[master].items()
            if isinstance(value, Tensor) and key not in ("step", "mu_product")
        }
        for what, value in expected.items():
            found = engine.states.get_full(name, what)
            assert found.dtype == master.dtype, (name, what)
            torch.testing.assert_close(found, value, rtol=0.0, atol=atol)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("world_size", "mix", "name"),
    [
        *((1, mix, name) for mix in MIXES for name in OPTIMIZERS),
        *((2, mix, "AdamW") for mix in ("fp32 first", "fp64 and bf16", "fp16, fp64 and fp32")),
        *((3, mix, "AdamW") for mix in ("fp32 first", "fp64 and bf16", "fp16, fp64 and fp32")),
    ],
)
@on_ranks()
def test_each_dtype_follows_torch_at_every_stage(
    ranks: SimulatedRanks, mix: str, name: str, tmp_path: Path
) -> None:
    losses, (masters, optimizer) = _reference(mix, name, ranks)
    # Gradients are sent in their own dtype: a third has no 16 bits, half of fp16's least neither.
    is_exact = ranks.size == 1 or (ranks.size == 2 and torch.float16 not in MIXES[mix])
    atol = 0.0 if is_exact else 1e-3
    for stage in (0, 1, 2, 3):
        engine = _engine(mix, name, stage, process_group=ranks)
        found = _run(engine, ranks.rank, range(2))
        engine.save_checkpoint(f"{tmp_path!s}/{ranks.size}-{stage}")
        found += _run(engine, ranks.rank, range(2, STEPS))
        torch.testing.assert_close(found, losses, rtol=0.0, atol=atol)
        _compare(engine, masters, optimizer, atol)
        other = _engine(mix, name, 3 - stage, process_group=ranks)
        other.load_checkpoint(f"{tmp_path!s}/{ranks.size}-{stage}")
        assert _run(other, ranks.rank, range(2, STEPS)) == found[2:]
        _compare(other, masters, optimizer, atol)
