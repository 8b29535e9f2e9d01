"""bf16 master weights, rounded master weights, and autocast over fp32 weights, as in torch."""

import copy
import gc
import itertools
from threading import Barrier

import pytest
import torch
from torch import Tensor, nn

import zero_core
from zero_core.testing import Case, SimulatedDDP, adamw, batch, make_model, simulate
from zero_core.testing.oracle import LR
from zero_core.testing.training import assert_same, train_steps

STEPS = 4
BF16_MASTERS = {
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
}


def by_engine(ranks, stage, top):
    torch.set_autocast_cache_enabled(False)
    engine = Case(stage=stage, top=top).build(ranks)
    losses = train_steps(engine, 0, STEPS)
    values = engine.full_state_dict()
    engine.close()
    return losses, values


def adafactor(model):
    return torch.optim.Adafactor([p for p in model.parameters() if p.requires_grad], LR)


def in_bf16(ranks, make=adamw):
    model = make_model().bfloat16()
    optimizer = make(model)
    losses = []
    for step in range(STEPS):
        loss = model(**batch(step, 0, ranks.rank))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


@pytest.mark.parametrize("make", [adamw, adafactor])
def test_bf16_masters_are_a_bf16_model_and_optimizer_at_all_stages(make):
    top = dict(BF16_MASTERS)
    if make is adafactor:  # Adafactor updates whole parameters
        top["optimizer"] = {"type": "Adafactor", "params": {"lr": LR}}
    expected = simulate(in_bf16, 1, make)
    first, *others = (simulate(by_engine, 3, stage, top) for stage in (1, 2, 3))
    for stage, other in zip((1, 3), others, strict=True):
        assert_same(simulate(by_engine, 1, stage, top), expected)
        assert_same(other, first)


def test_bf16_masters_take_no_further_memory():
    config = Case(stage=2, top=BF16_MASTERS).config()
    engine = zero_core.build(make_model(), config)
    train_steps(engine, 0, 1)
    tier = engine.sharded_state.tier
    dtypes = {name: tier.read_state(name, 0, 1).dtype for name in tier.state_names()}
    assert dtypes == dict.fromkeys(["master_weight", "exp_avg", "exp_avg_sq"], torch.bfloat16)
    assert not zero_core.plan(make_model(), config, 1).memory.device.get("master weights", 0)


def from_rounded(ranks):
    """Train a bf16 model through fp32 copies of its parameters, without an engine."""
    low = make_model().bfloat16()
    masters = copy.deepcopy(low).float()
    optimizer = adamw(masters)
    losses = []
    for step in range(STEPS):
        loss = low(**batch(step, 0, ranks.rank))["loss"]
        loss.backward()
        losses.append(loss.item())
        for p, master in zip(low.parameters(), masters.parameters(), strict=True):
            master.grad = None if p.grad is None else p.grad.float()
            p.grad = None
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(low.parameters(), masters.parameters(), strict=True):
                p.copy_(master)
    return losses, dict(low.state_dict())


@pytest.mark.parametrize("stage", [0, 3])
def test_masters_from_rounded_weights_are_deepspeeds(stage):
    top = {"bf16": {"enabled": True}, "data_types": {"master_weights_from": "rounded"}}
    assert_same(simulate(by_engine, 1, stage, top), simulate(from_rounded, 1))


def under_autocast(ranks, dtype):
    torch.set_autocast_cache_enabled(False)  # simulated ranks share autocast's cache
    model = make_model()
    ddp, optimizer = SimulatedDDP(model, ranks), adamw(model)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    losses = []
    for step in range(STEPS):
        with torch.autocast("cpu", dtype):
            loss = ddp(**batch(step, 0, ranks.rank))["loss"]
        scaler.scale(loss).backward()
        ddp.average_gradients()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


@pytest.mark.parametrize(
    ("world_size", "stage", "dtype"),
    [*itertools.product([2], range(4), ["bfloat16"]), (1, 2, "torch.float16"), (2, 3, "fp16")],
)
def test_autocast_is_ddp_under_autocast(world_size, stage, dtype):
    top = {"torch_autocast": {"enabled": True, "dtype": dtype}}
    half = torch.bfloat16 if "b" in dtype else torch.float16
    expected = simulate(under_autocast, world_size, half)
    assert_same(simulate(by_engine, world_size, stage, top), expected)


def _halves():
    return [t for t in gc.get_objects() if type(t) is Tensor and t.dtype is torch.bfloat16]


def _forward_under_autocast(ranks, done):
    model = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
    model.forward = lambda x: nn.Sequential(*model)(x)
    top = {"torch_autocast": {"enabled": True}}
    engine = Case(stage=3, top=top).build(ranks, model)
    done.wait()  # wait for the other rank's build(), which also creates 16-bit tensors
    before = _halves()  # keeps these tensors alive, so that no id is reused
    done.wait()
    loss = engine(torch.ones(2, 64)).sum()
    done.wait()
    known = {id(tensor) for tensor in before}
    assert not [t.shape for t in _halves() if t.numel() >= 64 * 64 and id(t) not in known]
    done.wait()
    engine.backward(loss)
    engine.step()
    engine.close()


def test_autocast_at_stage_3_keeps_no_weight_for_backward():
    simulate(_forward_under_autocast, 2, Barrier(2, timeout=60.0))
