"""`torch.amp.GradScaler` and `OffloadedOptimizer`: unscaled once, skipped after an overflow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.kernels import ReferenceAdam
from support.tiers import RATIOS
from torch import Tensor, nn, optim

from zero_offload import OffloadedOptimizer

OVERFLOW_AT = 2


def _model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5)).to(dtype)


def _train(
    model: nn.Module,
    optimizer: optim.Optimizer,
    *,
    max_norm: float = 0.0,
    before_step: Callable[[float], None] = lambda scale: None,
) -> list[float]:
    """Five steps, the third with an overflow; the loss scale after each."""
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
    return scales


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("max_norm", [0.0, 0.1])
@pytest.mark.parametrize("ratio", RATIOS)
def test_fp32_loop_with_a_scaler_equals_torch_bit_for_bit(ratio: float, max_norm: float) -> None:
    plain, ours = _model(torch.float32), _model(torch.float32)
    _train(plain, optim.AdamW(plain.parameters(), lr=1e-2), max_norm=max_norm)
    optimizer = OffloadedOptimizer(optim.AdamW, ours.parameters(), lr=1e-2, ratio=ratio)
    _train(ours, optimizer, max_norm=max_norm)
    assert torch.equal(_weights(ours), _weights(plain))
    assert optimizer.state_dict()["state"][0]["num_steps"] == 4


@pytest.mark.parametrize("kernel", [None, ReferenceAdam()], ids=["torch", "reference"])
@pytest.mark.parametrize("ratio", RATIOS)
def test_fp16_gradients_are_unscaled_in_fp32(ratio: float, kernel: ReferenceAdam | None) -> None:
    """Torch's AdamW over fp32 copies that take the unscaled gradients is what must come out."""
    plain, ours = _model(torch.float16), _model(torch.float16)
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
    for i, copy in enumerate(copies):
        found = entries[i]["master_weight"]
        if kernel is None:
            assert torch.equal(found, copy)
        else:
            torch.testing.assert_close(found, copy.detach(), rtol=1e-5, atol=1e-6)


class _Idle(optim.Optimizer):
    _step_supports_amp_scaling = True

    def __init__(self, params: object) -> None:
        super().__init__(params, {})  # type: ignore[arg-type]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Leave everything as it is."""
