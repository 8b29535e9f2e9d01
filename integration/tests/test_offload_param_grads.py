"""``param.grad`` at stage 0 where the host has the optimizer: the tier copies gradients."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

import zero_core
from zero_core.testing import Case, SimulatedRanks, batch, make_model, on_ranks

STEPS = 2
NADAM = {"optimizer": {"type": "NAdam", "params": {"lr": 1e-2}}}
"""Is updated by torch on the host and on the device."""


def _edit(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    first, second, third, *_ = (p for p in model.parameters() if p.grad is not None)
    first.grad = None
    second.grad = 2.0 * second.grad
    third.grad.data.clamp_(min=0.0)


def _edits(ranks: SimulatedRanks, accumulation: int, *, is_on_host: bool) -> tuple[Any, Any]:
    host = {"offload_optimizer": {"device": "cpu", "update_in_backward": False}}
    case = Case(accumulation=accumulation, zero=host if is_on_host else {}, top=NADAM)
    engine = zero_core.build(make_model(), case.config(), process_group=ranks)
    norms = []
    for step in range(STEPS):
        for micro in range(accumulation):
            engine.backward(engine(**batch(step, micro, ranks.rank))["loss"])
            if micro < accumulation - 1:
                engine.step()
        _edit(engine.module)
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms, engine.full_state_dict()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_changes_count_as_on_the_device_where_the_tier_copies_gradients(ranks, accumulation):
    found, expected = (_edits(ranks, accumulation, is_on_host=each) for each in (True, False))
    torch.testing.assert_close(found, expected)


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
