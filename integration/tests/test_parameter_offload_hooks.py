"""Programs that take stage 3's hooks from a model and put them back, as TRL does, go on."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from zero_core.testing import spawn
from zero_engine import deepspeed


def _config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "steps_per_print": 1000,
    }


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def _take_hooks(engine: Any) -> Any:
    """The attributes in the order in which TRL's remove_hooks asks for them."""
    offload = engine.optimizer.parameter_offload
    named = offload.module.named_parameters(recurse=True)
    for _, param in itertools.chain(named, offload.module.ds_external_parameters()):
        param.ds_active_sub_modules.clear()
    for hook in (*offload.forward_hooks, *offload.backward_hooks):
        hook.remove()
    offload.forward_hooks = []
    offload.backward_hooks = []
    return offload


def _step(engine: Any) -> float:
    loss = engine(torch.ones(2, 5)).square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss)


def _generate_and_train(rank: int, world_size: int) -> None:
    engine, *_ = deepspeed.initialize(model=_model(), config=_config(3))
    plain = _model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        with deepspeed.zero.GatheredParameters(engine.module.parameters()), torch.no_grad():
            offload = _take_hooks(engine)
            found = engine.module(torch.ones(1, 5))
            torch.testing.assert_close(found, plain(torch.ones(1, 5)))
            offload._register_deepspeed_module(offload.module)
        with deepspeed.runtime.zero.unwrap_model_for_generation(engine) as unwrapped:
            assert unwrapped is engine
            assert not offload.forward_hooks
            torch.testing.assert_close(engine.module[0].weight.detach(), plain[0].weight.detach())
        assert offload.forward_hooks
        generate = deepspeed.runtime.zero.unwrap_model_for_generation(engine)
        with pytest.raises(ZeroDivisionError), generate:
            raise ZeroDivisionError
        assert offload.forward_hooks
        loss = plain(torch.ones(2, 5)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(_step(engine), loss.item())
    engine.destroy()


def _below_stage_3(rank: int, world_size: int) -> None:
    engine, *_ = deepspeed.initialize(model=_model(), config=_config(2))
    assert not hasattr(engine.optimizer, "parameter_offload")
    engine.destroy()


def test_model_generates_with_its_hooks_taken_and_trains_on_as_in_torch() -> None:
    spawn(_generate_and_train, 2)


def test_below_stage_3_there_are_none_to_take() -> None:
    spawn(_below_stage_3, 1)
