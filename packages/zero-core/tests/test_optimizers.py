"""Adam and Lion beside their papers and torch, and named optimizers beside torch under DDP."""

import pytest
import torch
from torch import nn

import zero_core
from zero_core import ConfigError, Lion
from zero_core.optim.adam import Adam
from zero_core.testing import Case, assert_same, on_ranks, run_ddp, run_engine

LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.99), 1e-8, 0.1


def adam_of_the_paper(start, grads, *, is_adamw):
    """Adam's moments without their correction, in float64."""
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


def lion_of_the_paper(start, grads):
    """Algorithm 2 of Chen et al., 2023, in float64."""
    value, momentum = start.double(), torch.zeros_like(start, dtype=torch.float64)
    for grad in grads:
        g = grad.double()
        update = torch.sign(BETAS[0] * momentum + (1 - BETAS[0]) * g)
        value = value - LR * (update + DECAY * value)
        momentum = BETAS[1] * momentum + (1 - BETAS[1]) * g
    return value


def stepped(optimizer, grads):
    (param,) = optimizer.param_groups[0]["params"]
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


def draw(num_steps=6):
    """Return a parameter, its values, and gradients."""
    torch.manual_seed(0)
    start = torch.randn(13, 7)
    return nn.Parameter(start.clone()), start, [torch.randn(13, 7) for _ in range(num_steps)]


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("is_adamw", [False, True])
def test_adam_without_bias_correction_uses_the_moments_as_they_are(is_adamw, maximize):
    param, start, grads = draw()
    options = {"bias_correction": False, "decoupled_weight_decay": is_adamw, "maximize": maximize}
    optimizer = Adam([param], LR, BETAS, EPS, DECAY, **options)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    found = stepped(optimizer, grads).double()
    expected = adam_of_the_paper(start, [-g if maximize else g for g in grads], is_adamw=is_adamw)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert len(calls) == len(grads), "hooks of a step run once"


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


@pytest.mark.parametrize("maximize", [False, True])
def test_update_of_lion_is_that_of_the_paper(maximize):
    param, start, grads = draw(20)
    optimizer = Lion([param], lr=LR, betas=BETAS, weight_decay=DECAY, maximize=maximize)
    found = stepped(optimizer, grads).double()
    expected = lion_of_the_paper(start, [-g if maximize else g for g in grads])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    assert set(optimizer.state[param]) == {"exp_avg"}


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
    # Some parameters join later, and start their momentum then.
    case = Case(stage, top={"optimizer": optimizer})
    ours = run_engine(case, ranks.rank, 4, process_group=ranks)
    theirs = run_ddp(case, ranks.rank, 4, ranks)
    if optimizer["type"] == "Lion":
        assert ours.losses == theirs.losses
        assert_same(ours.values, theirs.values)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
