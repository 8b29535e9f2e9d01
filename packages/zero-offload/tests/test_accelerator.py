"""`OffloadedOptimizer` on an accelerator, compared with torch's optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim

from zero_offload import OffloadedOptimizer

pytestmark = pytest.mark.skipif(
    not torch.accelerator.is_available(), reason="this machine has no accelerator"
)


def test_offloaded_optimizer_follows_plain_torch() -> None:
    device = torch.accelerator.current_accelerator()
    torch.manual_seed(0)
    plain, ours = nn.Linear(64, 64, device=device), nn.Linear(64, 64, device=device)
    ours.load_state_dict(plain.state_dict())
    optimizers = (
        optim.AdamW(plain.parameters(), lr=1e-2),
        OffloadedOptimizer(optim.AdamW, ours.parameters(), lr=1e-2, ratio=0.4),
    )
    data = torch.randn(16, 64, device=device)
    for _ in range(10):
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(ours.weight, plain.weight, rtol=1e-4, atol=1e-5)
