"""A plain ``loss.backward()`` under `zero_engine.deepspeed` averages over the micro-steps.

DeepSpeed divides such a backward by ``gradient_accumulation_steps``
(`_backward_prologue_per_tensor` in its runtime/engine.py). The oracle is torch on one process, over
the batches of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zero_core.testing import spawn
from zero_engine import deepspeed

STEPS = 2
MICRO_STEPS = 4


class _Model(nn.Module):
    """Two outputs, one of which is made of the other, as Hugging Face's loss and logits are."""

    def __init__(self, *, is_reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.is_reentrant = is_reentrant

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x.requires_grad_()
        if self.is_reentrant is None:
            y = self.first(x)
        else:
            y = checkpoint(self.first, x, use_reentrant=self.is_reentrant)
        y = self.second(y.tanh()) * self.frozen
        return {"loss": y.square().mean(), "logits": y}


def _inputs(number: int, rank: int) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(7 * number + rank))


def _loss(found: dict[str, Tensor]) -> Tensor:
    return found["loss"] + found["logits"].sum()


def _plain(engine: Any, number: int, rank: int) -> None:
    _loss(engine(_inputs(number, rank))).backward()


def _scaled(engine: Any, number: int, rank: int) -> None:
    engine.scale(_loss(engine(_inputs(number, rank)))).backward()


def _own(engine: Any, number: int, rank: int) -> None:
    engine.backward(_loss(engine(_inputs(number, rank))))


def _mixed(engine: Any, number: int, rank: int) -> None:
    (_plain, _scaled, _own)[number % 3](engine, number, rank)


def _two_losses(engine: Any, number: int, rank: int) -> None:
    found = engine(_inputs(number, rank))
    found["loss"].backward(retain_graph=True)
    engine.backward(found["logits"].sum())


def _config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_STEPS,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **more,
    }


def _make(stage: int, *, is_reentrant: bool | None = None, **more: Any) -> Any:
    model = _Model(is_reentrant=is_reentrant)
    engine, *_ = deepspeed.initialize(model=model, config=_config(stage, **more))
    return engine


def _expected(world_size: int) -> dict[str, Tensor]:
    model = _Model()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO_STEPS):
            for rank in range(world_size):
                loss = _loss(model(_inputs(step * MICRO_STEPS + micro, rank)))
                (loss / MICRO_STEPS / world_size).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def _check(engine: Any, run: Callable[[Any, int, int], None]) -> None:
    for number in range(STEPS * MICRO_STEPS):
        run(engine, number, engine.global_rank)
        engine.step()
    found = engine.core.full_state_dict(dtype=torch.float32)
    for name, value in _expected(engine.world_size).items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    engine.destroy()


def _every_way(rank: int, world_size: int) -> None:
    for stage in (0, 2, 3):
        for run in (_plain, _scaled, _own, _mixed):
            _check(_make(stage), run)
        for is_reentrant in (False, True):
            _check(_make(stage, is_reentrant=is_reentrant), _plain)
    _check(_make(0), _two_losses)


def test_every_backward_averages_over_micro_steps_once() -> None:
    spawn(_every_way, 2)


def test_loss_may_come_through_the_engine_of_another_model() -> None:
    engine, other = _make(2), _make(2)
    engine.backward(engine(torch.ones(2, 3))["loss"] + other(torch.ones(2, 3))["loss"])
    weights = (engine.module.second.weight, other.module.second.weight)
    mine, theirs = (_grad(w, e) for w, e in zip(weights, (engine, other), strict=True))
    torch.testing.assert_close(mine, theirs)
    for made in (engine, other):
        made.destroy()


def _grad(weight: nn.Parameter, engine: Any) -> Tensor:
    before = weight.detach().clone()
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    master = deepspeed.utils.safe_get_full_fp32_param(weight)
    assert master is not None
    return before - master


def test_parameter_unfrozen_later_is_averaged_too() -> None:
    model = _Model()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model.first.requires_grad_(False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=_config(0))
    model.first.requires_grad_(True)
    _check(engine, _plain)


def test_backward_without_the_loss_scale_is_still_refused() -> None:
    engine = _make(0, fp16={"enabled": True, "initial_scale_power": 4})
    with pytest.raises(RuntimeError, match="Loss scaling is required in fp16"):
        engine(torch.ones(2, 3, dtype=torch.float16))["loss"].backward()
    engine.destroy()


@pytest.mark.parametrize("end", [lambda e: e.destroy(), lambda e: e.core.unwrap()])
def test_ended_engine_divides_no_gradient(end: Callable[[Any], Any]) -> None:
    engine = _make(0)
    end(engine)
    engine.module.second.bias.register_hook(seen := _Seen())
    engine.module(torch.ones(2, 3))["logits"].sum().backward()
    assert seen.grad is not None
    assert torch.equal(seen.grad, torch.full((2,), 2.0))


class _Seen:
    grad: Tensor | None = None

    def __call__(self, grad: Tensor) -> None:
        self.grad = grad
