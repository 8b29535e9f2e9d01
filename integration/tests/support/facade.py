"""A small model under `zero_engine.deepspeed`, and its training in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zero_core.testing import spawn
from zero_engine import deepspeed

LR, DECAY = 1e-2, 0.1
NO_PERSISTENCE = {"stage3_param_persistence_threshold": 0}
HOST = {"offload_optimizer": {"device": "cpu"}}


def config(stage: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": DECAY}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        **more,
    }


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def inputs(number: int, rank: int = 0, width: int = 3) -> Tensor:
    return torch.randn(2, width, generator=torch.Generator().manual_seed(70 * number + rank))


def make(model: nn.Module | None = None, /, *, stage: int = 0, **arguments: Any) -> Any:
    arguments.setdefault("config", config(stage))
    return deepspeed.initialize(model=net() if model is None else model, **arguments)[0]


def square(model: Callable[..., Tensor], *given: Any) -> Tensor:
    return model(*given).square().mean()


def train(engine: Any, steps: int, first: int = 0) -> list[float]:
    losses = []
    for number in range(first, first + steps):
        loss = square(engine, inputs(number, engine.global_rank).to(next(_floats(engine)).dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _floats(engine: Any) -> Any:
    return (p for p in engine.module.parameters() if p.is_floating_point())


def adamw(model: nn.Module, **more: Any) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, **{"lr": LR, "weight_decay": DECAY, **more})


def update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def add_gradients(
    model: nn.Module, number: int, ranks: int, *, over: float = 1.0, loss: Any = square
) -> None:
    """Add the gradient of the mean loss over all ranks' inputs, divided by ``over``."""
    for rank in range(ranks):
        (loss(model, inputs(number, rank)) / ranks / over).backward()


def by_torch(ranks: int, counts: list[int], *, over: int = 1) -> dict[str, Tensor]:
    """Train `net` on all ranks' inputs, with ``counts[i]`` backwards in step i."""
    model, number = net(), 0
    optimizer = adamw(model, fused=True)
    for count in counts:
        for _ in range(count):
            add_gradients(model, number, ranks, over=over)
            number += 1
        update(optimizer)
    return model.state_dict()


def check_values(
    engine: Any, expected: nn.Module | dict[str, Tensor], rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    values = dict(expected.state_dict()) if isinstance(expected, nn.Module) else expected
    found = engine.core.full_state_dict(dtype=torch.float32)
    torch.testing.assert_close(found, values, rtol=rtol, atol=atol)


def run_each(rank: int, world_size: int, checks: list[Callable[..., None]], *args: Any) -> None:
    for check in checks:
        check(rank, world_size, *args)


def on_ranks(world_size: int, checks: list[Callable[..., None]], *args: Any) -> None:
    """Run `run_each` on ranks. A single rank runs in this process."""
    if world_size == 1:
        run_each(0, 1, checks, *args)
    else:
        spawn(run_each, world_size, checks, *args)
