"""A small model and its training, for the plug-ins of torch's data-parallel wrappers."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

NUM_STEPS = 6
TARGET = torch.randn(33, 7, generator=torch.Generator().manual_seed(7)) / 33**0.5


def make_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(33, 257), nn.GELU(), nn.Linear(257, 101), nn.GELU(), nn.Linear(101, 7)
    ).to(dtype)


def batch(step: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return inputs, and targets that a fixed function computes from the inputs."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(32, 33, generator=generator)
    y = (x @ TARGET).tanh()
    return x.to(dtype), y.to(dtype)


def train(model: nn.Module, rank: int, *, num_steps: int = NUM_STEPS) -> list[float]:
    """Train with SGD, which is sensitive to the gradients' scale. Return rank-average losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    dtype = next(model.parameters()).dtype
    losses = []
    for step in range(num_steps):
        x, y = batch(step, rank, dtype)
        loss = (model(x) - y).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    total = torch.stack(losses)
    dist.all_reduce(total)
    averages: list[float] = (total / dist.get_world_size()).tolist()
    return averages


def backward(model: nn.Module, step: int, rank: int) -> None:
    x, y = batch(step, rank, torch.float32)
    (model(x) - y).square().mean().backward()


def gradients(module: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def gap(losses: list[float], plain: list[float]) -> float:
    """Return the largest difference between both runs' losses, relative to the plain run."""
    assert plain[-1] < plain[0] / 2, "the plain run must have learned something"
    return max(abs(a - b) / b for a, b in zip(losses, plain, strict=True))
