"""`torch.amp.GradScaler` and `OffloadedOptimizer`: unscaled once, skipped after an overflow."""

from __future__ import annotations

import pytest
import torch
from support.models import make_model, weights
from support.tiers import FP32, RATIOS
from torch import nn, optim

from zero_offload import OffloadedOptimizer

OVERFLOW_AT = 2


def _train(
    model: nn.Module,
    optimizer: optim.Optimizer,
    *,
    max_norm: float = 0.0,
) -> None:
    """Train for five steps, of which the third overflows and halves the loss scale."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    scales = []
    for step in range(5):
        data = torch.randn(11, 7, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(data.to(next(model.parameters()).dtype)).float().square().mean()
        factor = torch.inf if step == OVERFLOW_AT else 1.0
        scaler.scale(loss * factor).backward()
        if max_norm:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [4096.0, 4096.0, 2048.0, 2048.0, 2048.0]


@pytest.mark.parametrize("max_norm", [0.0, 0.1])
@pytest.mark.parametrize("ratio", RATIOS)
def test_fp32_loop_with_a_scaler_equals_torch_bit_for_bit(ratio: float, max_norm: float) -> None:
    plain, ours = make_model(FP32), make_model(FP32)
    _train(plain, optim.AdamW(plain.parameters(), lr=1e-2), max_norm=max_norm)
    optimizer = OffloadedOptimizer(optim.AdamW, ours.parameters(), lr=1e-2, ratio=ratio)
    _train(ours, optimizer, max_norm=max_norm)
    assert torch.equal(weights(ours), weights(plain))
    assert optimizer.state_dict()["state"][0]["num_steps"] == 4
