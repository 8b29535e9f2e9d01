"""`torch.amp.GradScaler` and `OffloadedOptimizer`: unscaled once, skipped after an overflow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.kernels import ReferenceAdam
from support.models import make_model, weights
from support.tiers import FP16, FP32, RATIOS
from torch import nn, optim

from zero_offload import OffloadedOptimizer

OVERFLOW_AT = 2


def _train(
    model: nn.Module,
    optimizer: optim.Optimizer,
    *,
    max_norm: float = 0.0,
    before_step: Callable[[float], None] = lambda scale: None,
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
        before_step(scaler.get_scale())
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


@pytest.mark.parametrize("kernel", [None, ReferenceAdam()], ids=["torch", "reference"])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_fp16_gradients_are_unscaled_in_fp32(ratio: float, kernel: ReferenceAdam | None) -> None:
    """The oracle is torch's AdamW over fp32 copies that take the unscaled gradients."""
    plain, ours = make_model(FP16), make_model(FP16)
    copies = [nn.Parameter(p.detach().float()) for p in plain.parameters()]
    over_copies = optim.AdamW(copies, lr=1e-2)

    def step_copies(scale: float) -> None:
        grads = [p.grad.float() / scale for p in plain.parameters() if p.grad is not None]
        if all(grad.isfinite().all() for grad in grads):
            for copy, grad in zip(copies, grads, strict=True):
                copy.grad = grad
            over_copies.step()
            with torch.no_grad():
                for p, copy in zip(plain.parameters(), copies, strict=True):
                    p.copy_(copy)

    # An optimizer for the scaler to skip or not; it leaves the parameters alone.
    _train(plain, _Idle(plain.parameters()), before_step=step_copies)
    optimizer = OffloadedOptimizer(
        optim.AdamW, ours.parameters(), lr=1e-2, ratio=ratio, adam_kernel=kernel
    )
    _train(ours, optimizer)
    entries = optimizer.state_dict()["state"]
    tolerance = 0 if kernel is None else 1e-5
    for i, copy in enumerate(copies):
        found = entries[i]["master_weight"]
        torch.testing.assert_close(found, copy.detach(), rtol=tolerance, atol=tolerance / 10)


class _Idle(optim.Optimizer):
    _step_supports_amp_scaling = True

    def __init__(self, params: object) -> None:
        super().__init__(params, {})  # type: ignore[arg-type]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Leave everything as it is."""
