"""Equal numbers on an accelerator, with its streams and pinned memory."""

from __future__ import annotations

import pytest
import torch
from support.kernels import ReferenceAdam
from support.tiers import ADAM, RATIOS, Space, make_tier
from torch import nn, optim

from zero_offload import OffloadedOptimizer

pytestmark = pytest.mark.skipif(
    not torch.accelerator.is_available(), reason="this machine has no accelerator"
)


def _train(ratio: float, dtype: torch.dtype, *, pin_memory: bool) -> torch.Tensor:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    space = Space(dtype)
    space.params = [(start, shard.to(device)) for start, shard in space.params]
    block = {"ratio": ratio, "pin_memory": pin_memory}
    tier = make_tier(space, kernel=ReferenceAdam(), on=device, **block)
    for step in range(20):
        grad = space.grad(step).to(device)
        releases = [tier.offer_grad(256, grad[256:]), tier.offer_grad(0, grad[:256])]
        tier.step(ADAM, range(5), grad_scale=0.5)
        for release in releases:
            if release is not None:
                release()
        grad.fill_(float("nan"))
        tier.wait_params(0, 256)
        tier.wait_params(256, space.numel)
        assert not space.flat_params().isnan().any()
    return tier.read_state("master_weight", 0, space.numel)


@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_ratio_follows_the_host(dtype: torch.dtype, pin_memory: bool) -> None:
    expected = _train(1.0, dtype, pin_memory=pin_memory)
    for ratio in RATIOS[:-1]:
        found = _train(ratio, dtype, pin_memory=pin_memory)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


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
