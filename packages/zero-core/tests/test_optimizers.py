"""Named optimizers compared with their papers and torch, and groups with different settings."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import zero_core
from zero_core import ConfigError, Lion
from zero_core.optim.adam import Adam
from zero_core.testing.models import make_tower, rows
from zero_core.testing.oracle import Case, SimulatedDDP, run_ddp, run_engine
from zero_core.testing.simulated import on_ranks
from zero_core.testing.training import assert_same, step_ddp, train

LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.99), 1e-8, 0.1


def adam_of_the_paper(start, grads, *, is_adamw):
    value = start.double()
    first = second = torch.zeros_like(value)
    for grad in grads:
        g = grad.double()
        if is_adamw:
            value = value * (1 - LR * DECAY)
        else:
            g = g + DECAY * value
        first = BETAS[0] * first + (1 - BETAS[0]) * g
        second = BETAS[1] * second + (1 - BETAS[1]) * g * g
        value = value - LR * first / (second.sqrt() + EPS)
    return value


def stepped(optimizer, grads):
    (param,) = optimizer.param_groups[0]["params"]
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


def draw():
    torch.manual_seed(0)
    start = torch.randn(13, 7)
    return nn.Parameter(start.clone()), start, [torch.randn(13, 7) for _ in range(6)]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("is_adamw", [False, True])
def test_adam_with_bias_correction_is_torchs_bit_by_bit(is_adamw, fused):
    param, start, grads = draw()
    options = {"lr": LR, "betas": BETAS, "weight_decay": DECAY, "fused": fused}
    mine = Adam([param], decoupled_weight_decay=is_adamw, **options)
    kind = torch.optim.AdamW if is_adamw else torch.optim.Adam
    theirs = kind([nn.Parameter(start)], foreach=False, **options)
    assert torch.equal(stepped(mine, grads), stepped(theirs, grads))
    assert float(mine.state[param]["step"]) == len(grads)


@pytest.mark.parametrize("make", [Lion, Adam, partial(Adam, bias_correction=False)])
def test_maximize_takes_the_steps_of_the_negated_gradients(make):
    found = []
    for sign in (1, -1):
        param, _, grads = draw()
        optimizer = make([param], lr=LR, weight_decay=DECAY, maximize=sign < 0)
        calls = []
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        found.append(stepped(optimizer, [sign * grad for grad in grads]))
        assert len(calls) == len(grads), "hooks of a step run once"
    assert torch.equal(*found)


def test_lion_leaves_a_parameter_without_a_gradient_alone_and_refuses_a_sparse_one():
    param = nn.Parameter(torch.ones(3))
    optimizer = Lion([param], weight_decay=0.5)
    optimizer.step()
    assert torch.equal(param, torch.ones(3))
    assert param not in optimizer.state
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse"):
        Lion(table.parameters()).step()


@pytest.mark.parametrize("kind", [Adam, Lion])
@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"lr": -1.0}, "lr must not be negative, got -1.0"),
        ({"weight_decay": float("nan")}, "weight_decay must not be negative, got nan"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\] must be in \[0, 1\)"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] must be in \[0, 1\)"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\] must be in \[0, 1\)"),
    ],
)
def test_settings_out_of_range_are_refused(kind, settings, match):
    with pytest.raises(ValueError, match=match):
        kind([nn.Parameter(torch.ones(1))], **settings)


def build(params, kind="Adam"):
    torch.manual_seed(0)
    config = {"train_batch_size": 1, "optimizer": {"type": kind, "params": params}}
    return zero_core.build(nn.Linear(3, 2), config)


@pytest.mark.parametrize(("kind", "is_adamw"), [("Adam", True), ("AdamW", True), ("Adam", False)])
def test_configuration_turns_bias_correction_off(kind, is_adamw):
    params = {"lr": LR, "betas": list(BETAS), "weight_decay": DECAY, "bias_correction": False}
    engine = build({**params, "adam_w_mode": is_adamw}, kind)
    start = engine.full_state_dict()["weight"]
    batch = torch.randn(5, 3)
    grads = [2 * batch.sum(0).expand(2, 3) for _ in range(3)]
    for _ in grads:
        engine.backward(2 * engine(batch).sum())
        engine.step()
    found = engine.full_state_dict()["weight"].double()
    expected = adam_of_the_paper(start, grads, is_adamw=is_adamw)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_keys_of_a_named_optimizer_are_taken_or_refused():
    engine = build({"set_grad_none": True, "fp32_optimizer_states": True, "bias_correction": True})
    assert type(engine.optimizer.given) is torch.optim.AdamW
    build({"bias_correction": False, "amsgrad": False})
    for kind, params, match in (
        ("Adam", {"fp32_optimizer_states": False}, r"_states = false is not served.*bfloat16"),
        ("Adam", {"bias_correction": False, "amsgrad": True}, "= false with amsgrad = true"),
        ("Lion", {"eps": 1e-8}, r"optimizer\.params\.eps: unknown key; Lion takes"),
    ):
        with pytest.raises(ConfigError, match=match):
            build(params, kind)


@pytest.mark.parametrize(
    ("world_size", "stage", "optimizer"),
    [
        *((2, stage, {"type": "Lion", "params": {"lr": LR}}) for stage in range(4)),
        *((n, 2, {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}}) for n in (1, 2)),
    ],
)
@on_ranks()
def test_named_optimizer_trains_as_under_ddp(ranks, stage, optimizer):
    # Some parameters are first used in the second step, in which their states must start.
    case = Case(stage, top={"optimizer": optimizer})
    ours = run_engine(case, ranks.rank, 4, process_group=ranks)
    theirs = run_ddp(case, ranks.rank, 4, ranks)
    if optimizer["type"] == "Lion":
        assert ours.losses == theirs.losses
        assert_same(ours.values, theirs.values)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)


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


def _halve_rates(optimizer, args, kwargs):
    for group in optimizer.param_groups:
        group["lr"] /= 2


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_groups_schedules_and_empty_groups_follow_ddp(ranks):
    batches = [rows(step, ranks.rank) for step in range(3)]
    for begins_empty, stages in ((False, (1, 2, 3)), (True, (0, 3))):
        model = make_tower()
        ddp, optimizer = SimulatedDDP(model, ranks), _optimizer(model, begins_empty=begins_empty)
        optimizer.register_step_pre_hook(_halve_rates)
        schedule = _schedule(optimizer)
        for inputs in batches:
            step_ddp(ddp, optimizer, inputs)
            schedule.step()
        for stage in stages:
            own = make_tower()
            given = _optimizer(own, begins_empty=begins_empty)
            given.register_step_pre_hook(_halve_rates)
            engine = Case(stage).build(ranks, own, optimizer=given, lr_scheduler=_schedule(given))
            seen = []
            engine.optimizer.register_step_pre_hook(lambda *_, seen=seen: seen.append("before"))
            engine.optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append("after"))
            train(engine, batches)
            assert seen == ["before", "after"] * 3
            found = [group["lr"] for group in engine.optimizer.param_groups]
            assert found == [group["lr"] for group in optimizer.param_groups]
            assert_same(engine.full_state_dict(), dict(model.state_dict()))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor])
def test_hooks_of_a_given_optimizer_run_once_a_step_until_they_are_removed(kind):
    model, seen = make_tower(), []
    given = kind(model.parameters(), lr=0.01)
    handle = given.register_step_pre_hook(lambda *_: seen.append("before"))
    given.register_step_post_hook(lambda *_: seen.append("after"))
    engine = Case(1).build(None, model, optimizer=given)
    given.register_step_post_hook(lambda *_: seen.append("late"))
    train(engine, [rows(0, 0)])
    handle.remove()
    train(engine, [rows(1, 0)])
    assert seen == ["before", "after", "late", "after", "late"]


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (3, 0), (3, 1), (3, 2), (3, 3)])
@on_ranks()
def test_summed_gradients_step_as_far_as_ddp_does_with_a_rate_times_the_ranks(ranks, stage):
    def case(rate, **more):
        sgd = {"type": "SGD", "params": {"lr": rate}}
        return Case(stage, top={"optimizer": sgd, **more})

    found = run_engine(case(0.01, gradient_allreduce_op="sum"), ranks.rank, 2, process_group=ranks)
    expected = run_ddp(case(0.01 * ranks.size), ranks.rank, 2, ranks)
    torch.testing.assert_close(found.values, expected.values, rtol=1e-5, atol=1e-7)
