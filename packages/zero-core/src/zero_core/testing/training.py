"""Training loops for tests that compare the engine with simulated DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

import zero_core
from zero_core.testing.models import batch
from zero_core.testing.oracle import LR, WEIGHT_DECAY, Case, SimulatedDDP
from zero_core.testing.simulated import SimulatedRanks

Inputs = Mapping[str, Any] | tuple[Any, ...] | Tensor
"""Arguments of a forward: by name, by position, or a single one."""


def loss_of(model: Callable[..., Any], inputs: Inputs) -> Tensor:
    if isinstance(inputs, Mapping):
        result = model(**inputs)
    else:
        result = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    loss: Tensor = result["loss"] if isinstance(result, Mapping) else result
    return loss


def train(engine: zero_core.Engine, batches: Iterable[Inputs | None]) -> list[float]:
    """Train one micro-step per batch, and return the losses. None: an idle step without a loss."""
    losses = []
    for inputs in batches:
        if inputs is None:
            engine.idle_step()
            continue
        loss = loss_of(engine, inputs)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return fused AdamW over the trainable parameters, with the settings of `Case.config`."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)


def train_ddp(
    model: nn.Module,
    ranks: SimulatedRanks,
    batches: Iterable[Inputs | None],
    accumulation: int | Sequence[int] = 1,
) -> list[float]:
    """Train with `SimulatedDDP` and `adamw`, one micro-step per batch, and return the losses.

    ``accumulation`` is the number of micro-steps per step, or a list with one number per step.
    Averaged gradients of a step's micro-steps are added. A batch is None if this rank has no data.
    """
    ddp, optimizer = SimulatedDDP(model, ranks), adamw(model)
    counts = iter(accumulation) if isinstance(accumulation, Sequence) else repeat(accumulation)
    sums: dict[nn.Parameter, Tensor] = {}
    losses, count, num_done = [], next(counts), 0
    for inputs in batches:
        if inputs is not None:
            loss = loss_of(ddp, inputs)
            torch.autograd.backward(loss / count)
            losses.append(loss.item())
        ddp.average_gradients()
        for param in model.parameters():
            if param.requires_grad and param.grad is not None:
                grad, param.grad = param.grad, None
                sums[param] = sums[param] + grad if param in sums else grad
        num_done += 1
        if num_done == count:
            for param, total in sums.items():
                param.grad = total
            optimizer.step()
            optimizer.zero_grad()
            sums.clear()
            count, num_done = next(counts, 1), 0
    return losses


def check_like_ddp(
    ranks: SimulatedRanks,
    make: Callable[[], nn.Module],
    draw: Callable[[int, int], Inputs | None],
    case: Case,
    *,
    steps: int = 3,
    atol: float = 0.0,
    **build_kwargs: Any,
) -> None:
    """Train ``make()`` with the engine and with `train_ddp`. Compare losses and state dicts.

    ``draw(micro-step, rank)`` returns inputs, or None for a rank without data. ``case`` must be
    fp32 without clipping. ``steps`` counts optimizer steps.
    """
    batches = [draw(number, ranks.rank) for number in range(steps * case.accumulation)]
    model = make()
    expected = train_ddp(model, ranks, batches, case.accumulation)
    engine = zero_core.build(make(), case.config(), process_group=ranks, **build_kwargs)
    torch.testing.assert_close(train(engine, batches), expected, rtol=0.0, atol=atol)
    values = engine.full_state_dict()
    torch.testing.assert_close(values, dict(model.state_dict()), rtol=0.0, atol=atol)
    engine.close()


def step_ddp(
    ddp: SimulatedDDP,
    optimizer: torch.optim.Optimizer,
    inputs: Inputs,
    edit: Callable[[nn.Module], object] = lambda module: None,
) -> float:
    """Train one step with `SimulatedDDP` and ``optimizer``, and return the loss.

    ``edit`` may change the module's averaged gradients before the optimizer uses them.
    """
    loss = loss_of(ddp, inputs)
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    ddp.average_gradients()
    edit(ddp.module)
    optimizer.step()
    return loss.item()


def train_steps(engine: zero_core.Engine, first: int, stop: int) -> list[float]:
    """Train `Hard` on this rank's batches of the steps ``[first, stop)``. Return the losses."""
    return train(engine, [batch(step, 0, engine.rank) for step in range(first, stop)])


def assert_same(found: Any, expected: Any) -> None:
    """Raise AssertionError unless tensors, or mappings or sequences of tensors, are equal."""
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
