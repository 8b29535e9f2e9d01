"""Loss scaling, overflow and clipping."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from torch import nn

import zero_core
from zero_core.config import Fp16Config
from zero_core.optim.train_state import LossScaler
from zero_core.step.gradient import clip_factor
from zero_core.testing import (
    Case,
    SimulatedDDP,
    SimulatedRanks,
    batch,
    make_model,
    run_ddp,
    run_engine,
    seeded,
    simulate,
)


def _scaler(**keys) -> LossScaler:
    return LossScaler(Fp16Config(enabled=True, **keys))


def test_the_scale_doubles_after_a_window_without_overflow():
    scaler = _scaler(initial_scale_power=4, loss_scale_window=3)
    scales = []
    for _ in range(7):
        scaler.update(is_overflow=False)
        scales.append(scaler.scale)
    assert scales == [16, 16, 32, 32, 32, 64, 64]


def test_hysteresis_is_used_up_before_the_scale_halves_and_the_floor_holds():
    scaler = _scaler(initial_scale_power=2, hysteresis=2, min_loss_scale=1.0)
    scales = []
    for _ in range(5):
        scaler.update(is_overflow=True)
        scales.append(scaler.scale)
    assert scales == [4, 2, 1, 1, 1]


def test_consecutive_hysteresis_is_restored_by_a_good_step():
    scaler = _scaler(initial_scale_power=4, hysteresis=2, consecutive_hysteresis=True)
    for is_overflow in (True, False, True, False):
        scaler.update(is_overflow=is_overflow)
    assert scaler.scale == 16


def test_a_constant_scale_stays():
    scaler = _scaler(loss_scale=128.0)
    scaler.update(is_overflow=True)
    assert scaler.scale == 128.0


@pytest.mark.parametrize("norm", [0.1, 1.0, 7.5])
def test_clipping_follows_torchs_formula(norm):
    param = nn.Parameter(torch.zeros(1))
    param.grad = torch.tensor([norm])
    nn.utils.clip_grad_norm_([param], 1.0)
    assert norm * clip_factor(norm, 1.0) == pytest.approx(param.grad.item(), rel=1e-6)
    assert clip_factor(norm, 0.0) == 1.0


def _fp16(stage: int, ranks: SimulatedRanks | None = None, **fp16) -> zero_core.Engine:
    config = Case(stage=stage).config()
    config["fp16"] = {"enabled": True, **fp16}
    config["bf16"] = {"enabled": False}
    return zero_core.build(make_model(), config, process_group=ranks)


def _overflow(ranks: SimulatedRanks) -> None:
    finals = []
    for stage in (0, 1, 2, 3):
        engine = _fp16(stage, ranks, initial_scale_power=30, hysteresis=1)
        before = engine.full_state_dict(dtype=torch.float32)
        skipped, losses = 0, []
        for step in range(40):
            engine.backward(loss := engine(**batch(step, 0, ranks.rank))["loss"])
            engine.step()
            losses.append(loss.item())
            if engine.skipped_steps == step + 1:
                after = engine.full_state_dict(dtype=torch.float32)
                assert all(torch.equal(before[k], after[k]) for k in before)
                skipped = step + 1
        assert 5 < skipped < 30
        assert engine.loss_scale == 2.0 ** (30 - skipped)
        assert losses[-1] < losses[0] / 2
        assert engine.optimizer.param_groups[0]["lr"] == 1e-2
        finals.append(engine.full_state_dict(dtype=torch.float32))
    for final in finals[1:]:
        assert all(torch.equal(final[k], finals[0][k]) for k in final)


def test_fp16_overflow_skips_on_all_ranks_and_training_goes_on():
    simulate(_overflow, 2)


def _as_grad_scaler(ranks: SimulatedRanks) -> None:
    """With a window so short that the scale grows until it overflows again, and again."""
    keys = {"fp16": {"enabled": True, "hysteresis": 1, "loss_scale_window": 2}}
    case = Case(stage=3, dtype="fp16", top=keys)
    ours = run_engine(case, ranks.rank, 16, process_group=ranks)
    torchs = run_ddp(case, ranks.rank, 16, ranks)
    assert ours.num_skipped == torchs.num_skipped > 5
    assert ours.losses == torchs.losses
    assert all(torch.equal(ours.values[k], v) for k, v in torchs.values.items())


def test_fp16_skips_and_scales_as_torchs_grad_scaler() -> None:
    simulate(_as_grad_scaler, 1)


class _Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with seeded(0):
            self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.sum()


def _one_bad_rank(ranks: SimulatedRanks, stage: int) -> None:
    records: list[str] = []
    handler = logging.Handler()
    own = threading.get_ident()
    handler.addFilter(lambda record: record.thread == own)  # of this rank
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("zero_core").addHandler(handler)
    for dtype in ("fp32", "bf16"):
        records.clear()
        engine = zero_core.build(
            _Product(), Case(stage=stage, dtype=dtype).config(), process_group=ranks
        )
        before = engine.full_state_dict()
        x = torch.ones(2, 3)
        if ranks.rank == 1:
            x[0, 0] = float("inf")
        engine.backward(engine(x))
        engine.step()
        after = engine.full_state_dict()
        assert all(torch.equal(before[k], after[k]) for k in before)
        assert engine.skipped_steps == 1
        assert "blocks.0.weight" in records[0]
        engine.backward(engine(torch.ones(2, 3)))
        engine.step()
        assert engine.skipped_steps == 1
        assert not torch.equal(
            engine.full_state_dict()["blocks.0.weight"], before["blocks.0.weight"]
        )


@pytest.mark.parametrize("stage", range(4))
def test_a_gradient_that_is_not_finite_on_one_rank_skips_on_all_and_names_the_parameter(stage):
    simulate(_one_bad_rank, 2, stage)


def test_the_check_can_be_switched_off():
    engine = zero_core.build(_Product(), {**Case().config(), "check_grad_overflow": False})
    engine.backward(engine(torch.full((2, 3), float("inf"))))
    engine.step()
    assert engine.skipped_steps == 0
    assert engine.full_state_dict()["blocks.0.weight"].isnan().any()


def test_fp16_with_a_plain_backward_needs_scale():
    engine = _fp16(0, initial_scale_power=4)
    engine.scale(engine(**batch(0, 0, 0))["loss"]).backward()
    engine.step()
    assert engine.skipped_steps == 0


def test_floating_inputs_are_cast_to_the_compute_dtype():
    engine = zero_core.build(_Product(), Case(dtype="bf16").config())
    assert engine(torch.ones(2, 3)).dtype == torch.bfloat16


def test_the_gradient_norm_is_the_whole_models():
    plain = _Product()
    plain(torch.ones(2, 3)).backward()
    expected = nn.utils.get_total_norm([p.grad for p in plain.parameters()]).item()
    engine = zero_core.build(_Product(), Case().config())
    assert engine.get_global_grad_norm() is None
    engine.backward(engine(torch.ones(2, 3)))
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(expected, rel=1e-6)


def _dtypes(ranks: SimulatedRanks, stage: int) -> None:
    finals = []
    for keys in (
        {},
        {"communication_data_type": "fp32"},
        {"data_types": {"grad_accum_dtype": "bf16"}},
    ):
        config = {**Case(stage=stage, dtype="bf16", accumulation=2).config(), **keys}
        engine = zero_core.build(make_model(), config, process_group=ranks)
        for step in range(4):
            for micro in range(2):
                engine.backward(engine(**batch(step, micro, ranks.rank))["loss"])
                engine.step()
        finals.append(engine.full_state_dict(dtype=torch.float32)["embed.weight"])
        report = engine.memory_report()
        width = 2 if "data_types" in keys else 4
        trainable = [s for s in engine.layout.segments if s.is_trainable]
        if stage > 0:
            assert report["gradient shards"] == width * sum(s.shard_numel for s in trainable)
        elif engine.world_size > 1:  # what is reduced in, and the sum, if it needs its own
            reduced = 4 if "communication_data_type" in keys else 2
            both = reduced + (width if width != reduced else 0)
            assert report["gradients"] == both * sum(s.padded_numel for s in trainable)
    for other in finals[1:]:
        assert not torch.equal(finals[0], other)  # the setting has an effect
        torch.testing.assert_close(other, finals[0], atol=0.02, rtol=0.0)


def _declared(ranks: SimulatedRanks, name: str, dtype: torch.dtype) -> None:
    plain = make_model()
    ddp, params = SimulatedDDP(plain, ranks), list(plain.parameters())
    optimizer = torch.optim.SGD((p for p in params if p.requires_grad), lr=0.5)
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
    top = {"communication_data_type": name, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
    for stage in range(4):
        case = Case(stage, accumulation=3, is_local=True, top=top)
        found = run_engine(case, ranks.rank, 3, process_group=ranks).values
        assert all(torch.equal(found[key], expected[key]) for key in found), stage


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_declared_dtype_is_communicated_after_no_sync(name, dtype):
    simulate(_declared, 2, name, dtype)


@pytest.mark.parametrize("stage", range(4))
def test_communication_and_accumulation_dtypes_are_honoured(stage):
    simulate(_dtypes, 3, stage)
