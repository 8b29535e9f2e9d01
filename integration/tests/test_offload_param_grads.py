"""``param.grad`` at stage 0 where the host has the optimizer: the tier copies gradients."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import zero_core
from zero_core.testing import (
    LR,
    WEIGHT_DECAY,
    Case,
    SimulatedDDP,
    SimulatedRanks,
    batch,
    make_model,
    simulate,
)

STEPS = 2


def _edit(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    first, second, third, *_ = (p for p in model.parameters() if p.grad is not None)
    first.grad = None
    second.grad = 2.0 * second.grad
    third.grad.data.clamp_(min=0.0)


def _follows_ddp(ranks: SimulatedRanks, accumulation: int) -> None:
    case = Case(
        accumulation=accumulation,
        zero={"offload_optimizer": {"device": "cpu", "update_in_backward": False}},
    )
    wanted = make_model()
    ddp = SimulatedDDP(wanted, ranks)
    trained = [p for p in wanted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=WEIGHT_DECAY)
    engine = zero_core.build(make_model(), case.config(), process_group=ranks)
    for step in range(STEPS):
        for micro in range(accumulation):
            inputs = batch(step, micro, ranks.rank)
            (ddp(**inputs)["loss"] / accumulation).backward()
            engine.backward(engine(**inputs)["loss"])
            if micro < accumulation - 1:
                engine.step()
        ddp.average_gradients()
        if ranks.rank == 0:
            assert any(p.grad is not None for p in engine.module.parameters())
        for model in (wanted, engine.module):
            _edit(model)
        grads = [p.grad for p in trained if p.grad is not None]
        norm = nn.utils.get_total_norm(grads).item()
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-4)
    full = engine.full_state_dict()
    values = {name: full[name] for name, _ in wanted.named_parameters()}
    torch.testing.assert_close(values, dict(wanted.named_parameters()), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_changes_count_where_the_tier_copies_gradients(world_size, accumulation):
    simulate(_follows_ddp, world_size, accumulation)


def test_a_gradient_that_an_update_in_backward_has_used_is_told_as_missing(caplog):
    case = Case(
        zero={"offload_optimizer": {"device": "cpu", "update_in_backward": True}},
        top={"check_grad_overflow": False},
    )
    engine = zero_core.build(make_model(), case.config())
    engine.backward(engine(**batch(0, 0, 0))["loss"])
    with caplog.at_level(logging.WARNING):
        assert all(p.grad is None for p in engine.module.parameters())
    (record,) = (r for r in caplog.records if "param.grad" in r.message)
    assert "update_in_backward to false" in record.message
    param = next(p for p in engine.module.parameters() if p.requires_grad)
    with pytest.raises(RuntimeError, match="is not kept where units are updated"):
        param.grad = torch.ones_like(param)
