"""Clipping by any p-norm follows torch.nn.utils.clip_grad_norm_ on DDP's gradients."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

import zero_core
from zero_core.testing import Case, SimulatedDDP, assert_same, batch, make_model, on_ranks, step_ddp

NORMS = (1.0, 2.0, 3.0, math.inf)
STEPS = 3


def _optimizer(model):
    # SGD: a factor on the gradient shows in the weights, which Adam would hide.
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)


def _max_norm(norm_type, step):
    return 1e6 if step == 1 else {1.0: 2.0, 2.0: 0.3, 3.0: 0.2, math.inf: 0.1}[norm_type]


def _ddp(norm_type, ranks):
    model = make_model()
    ddp, optimizer, norms = SimulatedDDP(model, ranks), _optimizer(model), []

    def clip(model):
        limit = _max_norm(norm_type, len(norms))
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit, norm_type).item())

    for step in range(STEPS):
        step_ddp(ddp, optimizer, batch(step, 0, ranks.rank), clip)
    return norms, dict(model.state_dict())


def _build(ranks, case):
    model = make_model()
    optimizer = _optimizer(model)
    return case.build(ranks, model, optimizer=optimizer)


def _engine(stage, norm_type, ranks):
    engine, norms = _build(ranks, Case(stage)), []
    for step in range(STEPS):
        engine.backward(engine(**batch(step, 0, ranks.rank))["loss"])
        norms.append(engine.clip_grad_norm_(_max_norm(norm_type, step), norm_type))
        engine.step()
    return norms, engine.full_state_dict()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_each_norm_clips_as_torch_does_on_ddp(ranks, norm_type):
    norms, values = _ddp(norm_type, ranks)
    assert norms[0] > _max_norm(norm_type, 0), "the first step must be clipped"
    found = [_engine(stage, norm_type, ranks) for stage in (0, 1, 2, 3)]
    # Both sum powers in fp32, in another order.
    torch.testing.assert_close(found[0][0], norms, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(found[0][1], values, rtol=1e-5, atol=1e-6)
    for one, other in pairwise(found):
        assert_same(one[1], other[1])


@on_ranks(2)
def test_clippings_follow_one_another_and_last_for_one_step(ranks):
    engine = _build(ranks, Case(stage=2, clipping=0.05))
    engine.backward(engine(**batch(0, 0, ranks.rank))["loss"])
    before = engine.clip_grad_norm_(1.0, math.inf)
    engine.clip_grad_norm_(0.1)
    assert engine.clip_grad_norm_(1e6) == pytest.approx(0.1, rel=1e-4)
    start = engine.full_state_dict()
    engine.step()
    moved = [
        (value - start[name]).flatten()
        for name, value in engine.full_state_dict().items()
        if name != "head.weight"  # tied
    ]
    assert torch.cat(moved).norm().item() == pytest.approx(0.5 * 0.05, rel=1e-3)
    engine.backward(engine(**batch(0, 0, ranks.rank))["loss"])
    assert engine.clip_grad_norm_(1e6, math.inf) == pytest.approx(before, rel=0.5)
    assert engine.clip_grad_norm_(1e6, math.inf) > 0.02, "a new step starts unclipped"


@on_ranks(2)
def test_the_norm_is_that_of_the_unscaled_gradient(ranks):
    norms = []
    for scale in (1.0, 1024.0):
        config = Case(stage=3).config() | {"fp16": {"enabled": True, "loss_scale": scale}}
        engine = zero_core.build(make_model(), config, process_group=ranks)
        engine.backward(engine(**batch(0, 0, ranks.rank))["loss"])
        norms.append(engine.clip_grad_norm_(1.0, 1.0))
    assert norms[0] == pytest.approx(norms[1], rel=0.02)


def test_a_gradient_that_is_not_whole_is_not_clipped():
    engine = Case(accumulation=2).build()
    engine.backward(engine(**batch(0, 0, 0))["loss"])
    with pytest.raises(RuntimeError, match="not whole yet"):
        engine.clip_grad_norm_(1.0)
    engine.step()
    with engine.no_sync(), pytest.raises(RuntimeError, match="not whole yet"):
        engine.clip_grad_norm_(1.0)
    with pytest.raises(ValueError, match="max_norm"):
        engine.clip_grad_norm_(0.0)
