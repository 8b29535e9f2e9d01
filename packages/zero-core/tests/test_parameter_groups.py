"""Optimizer groups with settings of their own, schedules over them, groups without parameters."""

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import zero_core
from zero_core.testing.models import batch, make_model, make_tower, rows
from zero_core.testing.oracle import Case, SimulatedDDP
from zero_core.testing.simulated import on_ranks
from zero_core.testing.training import assert_same, step_ddp, train


def _optimizer(model, *, begins_empty):
    decay = [p for p in model.blocks.parameters() if p.ndim > 1]
    rest = [p for p in model.blocks.parameters() if p.ndim == 1]
    ends = [*model.first.parameters(), *model.head.parameters()]
    groups = [
        {"params": decay, "weight_decay": 0.3, "lr": 2e-2},
        {"params": [], "lr": 5.0},
        {"params": rest, "weight_decay": 0.0},
        {"params": ends, "lr": 1e-3, "betas": (0.5, 0.8)},
    ]
    if begins_empty:
        groups[0], groups[1] = groups[1], groups[0]
    return torch.optim.AdamW(groups, lr=1e-2)


def _schedule(optimizer):
    factors = [lambda step, i=i: 1.0 / (1 + i * step) for i in range(4)]
    return LambdaLR(optimizer, factors)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_groups_schedules_and_empty_groups_follow_ddp(ranks):
    batches = [rows(step, ranks.rank) for step in range(4)]
    for begins_empty in (False, True):
        model = make_tower()
        ddp, optimizer = SimulatedDDP(model, ranks), _optimizer(model, begins_empty=begins_empty)
        schedule = _schedule(optimizer)
        for inputs in batches:
            step_ddp(ddp, optimizer, inputs)
            schedule.step()
        for stage in (0, 1, 2, 3):
            own = make_tower()
            given = _optimizer(own, begins_empty=begins_empty)
            engine = Case(stage).build(ranks, own, optimizer=given, lr_scheduler=_schedule(given))
            seen = []
            engine.optimizer.register_step_pre_hook(lambda *_, seen=seen: seen.append("before"))
            engine.optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append("after"))
            train(engine, batches)
            assert seen == ["before", "after"] * 4
            found = [group["lr"] for group in engine.optimizer.param_groups]
            assert found == [group["lr"] for group in optimizer.param_groups]
            values = engine.full_state_dict()
            assert_same(values, dict(model.state_dict()))


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (3, 0), (3, 1), (3, 2), (3, 3)])
@on_ranks()
def test_summed_gradients_step_as_far_as_ddp_does_with_a_rate_times_the_ranks(ranks, stage):
    batches = [batch(step, 0, ranks.rank) for step in range(2)]
    model, own = make_model(), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * ranks.size)
    for inputs in batches:
        step_ddp(SimulatedDDP(model, ranks), optimizer, inputs)
    config = {**Case(stage).config(), "gradient_allreduce_op": "sum"}
    given = torch.optim.SGD(own.parameters(), lr=0.01)
    engine = zero_core.build(own, config, optimizer=given, process_group=ranks)
    train(engine, batches)
    values = dict(model.state_dict())
    torch.testing.assert_close(engine.full_state_dict(), values, rtol=1e-5, atol=1e-7)
