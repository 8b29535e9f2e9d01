import math
import threading
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_core
from zero_core.config import Fp16Config
from zero_core.optim.train_state import LossScaler
from zero_core.testing.models import batch, make_model, make_tower, rows, seeded
from zero_core.testing.oracle import Case, SimulatedDDP, run_engine
from zero_core.testing.simulated import device_collectives, on_ranks, simulate
from zero_core.testing.training import assert_same, step_ddp, train


@pytest.mark.parametrize(
    ("keys", "overflows", "scales"),
    [
        ({"initial_scale_power": 4, "loss_scale_window": 3}, [0] * 7, [16, 16, 32, 32, 32, 64, 64]),
        (
            {"initial_scale_power": 2, "hysteresis": 2, "min_loss_scale": 1.0},
            [1] * 5,
            [4, 2, 1, 1, 1],
        ),
        (
            {"initial_scale_power": 4, "hysteresis": 2, "consecutive_hysteresis": True},
            [1, 0, 1, 0],
            [16] * 4,
        ),
        ({"loss_scale": 128.0}, [1, 1], [128, 128]),
    ],
    ids=["doubles after a window", "halves to a floor", "restored by a good step", "constant"],
)
def test_the_loss_scale(keys, overflows, scales):
    scaler, found = LossScaler(Fp16Config(enabled=True, **keys)), []
    for is_overflow in overflows:
        scaler.update(is_overflow=bool(is_overflow))
        found.append(scaler.scale)
    assert found == scales


def test_the_check_can_be_switched_off():
    engine = zero_core.build(make_tower(), {**Case().config(), "check_grad_overflow": False})
    train(engine, [torch.full((2, 7), float("inf"))])
    assert engine.skipped_steps == 0
    assert engine.full_state_dict()["first.weight"].isnan().any()


def test_floating_inputs_are_cast_to_the_compute_dtype():
    engine = Case(dtype="bf16").build(model=make_tower())
    assert engine(rows(0, 0)).dtype == torch.bfloat16


# With SGD, unlike Adam, a wrong factor of the gradient changes the weights.
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}}


def _sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@on_ranks(2)
def test_the_declared_dtype_is_communicated_after_no_sync(ranks, name, dtype):
    plain = make_model()
    ddp, params = SimulatedDDP(plain, ranks), list(plain.parameters())
    optimizer = _sgd(plain)
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(3):
            (ddp(**batch(step, micro, ranks.rank))["loss"] / 3).backward()
        for param in params:
            if param.grad is not None:
                param.grad = (param.grad / 2).to(dtype).float() * 2
        ddp.average_gradients()
        optimizer.step()
    expected = plain.state_dict()
    for stage in range(4):
        case = Case(
            stage, accumulation=3, is_local=True, top={"communication_data_type": name, **SGD}
        )
        found = run_engine(case, ranks.rank, 3, process_group=ranks).values
        assert all(torch.equal(found[key], expected[key]) for key in found), stage


class _Scaled(nn.Module):
    """Two blocks whose outputs are summed, so that a bad input spoils only one block's gradient."""

    def __init__(self):
        super().__init__()
        with seeded(0):
            self.blocks = nn.ModuleList(nn.Linear(3, 5, bias=False) for _ in range(2))

    def forward(self, first, second):
        return self.blocks[0](first).sum() + self.blocks[1](second).sum()


def _told_here(caplog):
    return [r.getMessage() for r in caplog.records if r.thread == threading.get_ident()]


def _inputs(*, is_spoilt):
    good, bad = torch.ones(2, 3), torch.full((2, 3), torch.inf)
    return good, bad if is_spoilt else good


@pytest.mark.parametrize(
    ("world_size", "dtype", "bad_micro", "is_local", "stage"),
    [
        *((1, "fp32", 1, False, 0), (1, "bf16", 1, False, 3), (1, "fp16", 1, False, 2)),
        *((2, "bf16", 1, False, 0), (2, "fp16", 1, False, 3), (3, "fp32", 1, False, 3)),
        *((3, "bf16", 1, False, 1), (3, "fp16", 1, False, 1)),
        *((2, "fp32", 0, is_local, stage) for is_local in (False, True) for stage in range(4)),
    ],
)
@on_ranks()
def test_a_spoilt_batch_is_named_with_its_rank_and_the_step_is_skipped_by_all(
    ranks, dtype, bad_micro, is_local, stage, caplog
):
    culprit = ranks.size - 1
    case = Case(stage, "fp32" if dtype == "fp16" else dtype, accumulation=2)
    engine = zero_core.build(
        _Scaled(),
        case.config() | {"fp16": {"enabled": dtype == "fp16", "loss_scale": 2.0}},
        process_group=ranks,
    )
    before = engine.full_state_dict(dtype=torch.float32)
    for step in range(2):
        for micro in range(2):
            is_spoilt = ranks.rank == culprit and (step, micro) == (0, bad_micro)
            with engine.no_sync() if is_local and micro == 0 else nullcontext():
                engine.backward(engine(*_inputs(is_spoilt=is_spoilt)))
            engine.step()
        assert engine.optimizer.overflow == (step == 0)
        after = engine.full_state_dict(dtype=torch.float32)
        assert all(torch.equal(after[name], value) == (step == 0) for name, value in before.items())
    assert engine.skipped_steps == 1
    (text,) = _told_here(caplog)
    assert f"(blocks.1.weight: batch of rank {culprit})" in text


@on_ranks(2)
def test_a_sum_that_overflows_blames_no_rank(ranks, caplog):
    engine = Case(stage=1).build(ranks, _Scaled())
    big = torch.full((1, 3), 3e38)
    for _ in range(3):
        with engine.no_sync():
            engine.backward(engine(torch.ones(1, 3), big) * 0.5)
    engine.backward(engine(torch.ones(1, 3), big) * 0.5)
    engine.step()
    assert (
        "(blocks.1.weight: each rank's part is finite, their sum is not)" in _told_here(caplog)[0]
    )


class _Reticent:
    """Collectives whose reductions do not report each rank's contribution."""

    def __init__(self, native, **_):
        self.all_gather = native.all_gather
        self._native = native

    def reduce_scatter(self, out, full, *, unit):
        work = self._native.reduce_scatter(out, full, unit=unit)
        work.wait()
        work.contributions = ()
        return work


CULPRITS = {
    # World size, ranks per node, ranks with non-finite input, whether on an accelerator, message.
    "several": (3, 3, (0, 2), False, "batches of ranks 0, 2"),
    "of two nodes": (4, 2, (1, 2), True, "batches of ranks 1, 2"),
    "of one node": (4, 4, (1, 2), True, "batches of ranks 1, 2"),
    "unseen": (2, 2, (1,), False, "which rank's batch did it is not known"),
}


def _is_told(ranks, which, caplog):
    _, _, culprits, is_device, said = CULPRITS[which]

    def on_device(native, **_):
        return device_collectives(ranks)

    collectives = on_device if is_device else _Reticent if which == "unseen" else None
    engine = Case(stage=2).build(ranks, _Scaled(), collectives=collectives)
    engine.backward(engine(*_inputs(is_spoilt=ranks.rank in culprits)))
    engine.step()
    assert f"(blocks.1.weight: {said})" in _told_here(caplog)[0]


@pytest.mark.parametrize("which", CULPRITS)
def test_the_ranks_at_fault_are_named_where_their_parts_of_the_sum_are_seen(which, caplog):
    world_size, per_node, *_ = CULPRITS[which]
    simulate(_is_told, world_size, which, caplog, ranks_per_node=per_node)


NORMS = (1.0, 2.0, 3.0, math.inf)
STEPS = 3


def _max_norm(norm_type, step):
    return 1e6 if step == 1 else {1.0: 2.0, 2.0: 0.3, 3.0: 0.2, math.inf: 0.1}[norm_type]


def _clipped_ddp(norm_type, ranks):
    model = make_model()
    ddp, optimizer, norms = SimulatedDDP(model, ranks), _sgd(model), []

    def clip(model):
        limit = _max_norm(norm_type, len(norms))
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit, norm_type).item())

    for step in range(STEPS):
        step_ddp(ddp, optimizer, batch(step, 0, ranks.rank), clip)
    return norms, dict(model.state_dict())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_each_norm_clips_as_torch_does_on_ddp(ranks, norm_type):
    norms, values = _clipped_ddp(norm_type, ranks)
    assert norms[0] > _max_norm(norm_type, 0), "the first step must be clipped"
    engines = [Case(stage, top=SGD).build(ranks) for stage in range(4)]
    for step, norm in enumerate(norms):
        for engine in engines:
            engine.backward(engine(**batch(step, 0, ranks.rank))["loss"])
            found = engine.clip_grad_norm_(_max_norm(norm_type, step), norm_type)
            assert found == pytest.approx(norm, rel=1e-5)
            engine.step()
    # The engine and torch sum powers in different orders.
    found = [engine.full_state_dict() for engine in engines]
    torch.testing.assert_close(found[0], values, rtol=1e-5, atol=1e-6)
    for one, other in pairwise(found):
        assert_same(one, other)


@on_ranks(2)
def test_clippings_follow_one_another_and_last_for_one_step(ranks):
    engine = Case(stage=2, clipping=0.05, top=SGD).build(ranks)
    engine.backward(engine(**batch(0, 0, ranks.rank))["loss"])
    before = engine.clip_grad_norm_(1.0, math.inf)
    engine.clip_grad_norm_(0.1)
    assert engine.clip_grad_norm_(1e6) == pytest.approx(0.1, rel=1e-4)
    start = engine.full_state_dict()
    engine.step()
    moved = [
        (value - start[name]).flatten()
        for name, value in engine.full_state_dict().items()
        if name != "head.weight"  # tied to embed.weight
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


class _Twice(nn.Module):
    """Applies a checkpointed layer twice. In backward, each call adds to the layer's gradient."""

    def __init__(self):
        super().__init__()
        with seeded(3):
            self.blocks = nn.ModuleList([nn.Linear(64, 64)])

    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.blocks[0], x, use_reentrant=True)
        return x.float().square().mean()


@on_ranks(3)
def test_averages_of_16_bits_have_no_bias_where_a_gradient_has_two_terms(ranks):
    x = rows(0, 0, 64).bfloat16().requires_grad_()  # the same batch on each rank
    engine = Case(2, "bf16").build(ranks, _Twice())
    plain = _Twice().bfloat16()
    plain(x).backward()
    engine.backward(engine(x))
    expected = plain.blocks[0].weight.grad.float()
    found = engine.states.get_full("blocks.0.weight", "grad")
    # With 1/3 rounded to bf16, the ratio would be 1.00195.
    assert abs((found * expected).sum() / expected.square().sum() - 1) < 2e-4
