"""A model and a training loop, on one process or on ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Create a model with layer sizes that 2, 3 and 4 ranks cannot divide.

    Under FSDP2 some ranks have no element of the last layer.
    """
    torch.manual_seed(5)
    layers = [nn.Linear(7, 13), nn.GELU(), nn.LayerNorm(13), nn.Linear(13, 5), nn.Linear(5, 1)]
    return nn.Sequential(*layers).to(dtype)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return parameter groups with weight decay for matrices only."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


def loop(
    model: nn.Module,
    optimizer: optim.Optimizer,
    rank: int = 0,
    steps: range = range(5),
    max_norm: float = 0.0,
) -> list[float]:
    """Train on this rank's batches. Return the losses, each after its gradient norm if clipped."""
    schedule = optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    found: list[float] = []
    for step in steps:
        data = torch.randn(6, 7, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        loss = model(data.to(next(model.parameters()).dtype)).float().square().mean()
        loss.backward()
        if max_norm:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            found.append(whole(norm).item())
        optimizer.step()
        schedule.step()
        found.append(loss.item())
    return found


def whole(tensor: Tensor) -> Tensor:
    """Return all elements of a tensor. For a DTensor this is a collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights(model: nn.Module) -> Tensor:
    """Return all weights as one fp32 vector. For DTensors this is a collective."""
    return torch.cat([whole(p.detach()).flatten().float() for p in model.parameters()])
