"""Units updated in backward although the step may be clipped or skipped: an undo log.

The oracle is the late update: see `tests.speculation_runs`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_core
from tests.speculation_runs import OPTIMIZERS, Run, bits, both, drain, states_of, train
from zero_core.config import load_config
from zero_core.step import speculation
from zero_core.step.speculation import TRIAL, WINDOW, Speculation
from zero_core.testing import SimulatedRanks, batch, make_model, simulate


def num_undone(engine: zero_core.Engine) -> int:
    tier: Any = engine.sharded_state.tier
    return sum(part.tier.num_undone for part in tier.report() if part.is_host)


def median_norm(run: Run, ranks: SimulatedRanks, steps: int) -> float:
    """Return the limit that clips about half of the steps."""
    norms = [n for n in train(run, ranks, steps, is_early=False).norms if math.isfinite(n)]
    return sorted(norms)[len(norms) // 2]


def _clip(ranks: SimulatedRanks, stage: int, steps: int) -> None:
    plain = train(Run(stage=stage), ranks, steps, is_early=False)
    rare = sorted(plain.norms)[-max(steps // 10, 1)]
    for clipping, low, high in ((1e9, 0.0, 0.0), (rare, 0.02, 0.4), (1e-3, 1.0, 1.0)):
        found = both(Run(stage=stage, clipping=clipping), ranks, steps)
        fraction = sum(norm > clipping for norm in found.norms) / steps
        assert low <= fraction <= high, (clipping, fraction)
        assert (found.num_undone == 0) == (high == 0.0)
        assert (found.num_kept == 0) == (low == 1.0)


@pytest.mark.parametrize(
    ("stage", "world_size"),
    [
        pytest.param(1, 3, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
        (3, 1),
        pytest.param(3, 3, marks=pytest.mark.slow),
        pytest.param(0, 2, marks=pytest.mark.slow),
    ],
)
def test_clipping_in_no_step_in_some_and_in_all_changes_no_bit(stage: int, world_size: int) -> None:
    simulate(_clip, world_size, stage, 60)


def _optimizers(ranks: SimulatedRanks) -> None:
    for name, dtype in itertools.product(OPTIMIZERS, ("fp32", "bf16")):
        run = Run(dtype=dtype, optimizer=name)
        found = both(replace(run, clipping=median_norm(run, ranks, 8)), ranks, 8)
        assert found.num_kept, name
        assert found.num_undone, name


@pytest.mark.slow
def test_five_optimizers_are_undone_and_redone() -> None:
    simulate(_optimizers, 2)


def _compact(ranks: SimulatedRanks) -> None:
    for state_dtype, dtype, device in itertools.product(
        ("bfloat16", "int8"), ("bf16", "fp32"), ("none", "cpu")
    ):
        run = Run(
            dtype=dtype,
            offload={"state_dtype": state_dtype},
            zero={"offload_param": {"device": device}},
        )
        found = both(replace(run, clipping=median_norm(run, ranks, 10)), ranks, 10)
        assert found.num_kept, run
        assert found.num_undone, run


@pytest.mark.slow
def test_states_of_few_bits_and_split_master_weights_are_undone() -> None:
    simulate(_compact, 2)


def _overflow(ranks: SimulatedRanks) -> None:
    for accumulation in (1, 3):
        run = Run(dtype="fp16", accumulation=accumulation, stage=2, pace=1)
        clipping = median_norm(run, ranks, 14) if accumulation > 1 else 0.0
        found = both(replace(run, clipping=clipping), ranks, 14)
        assert found.num_skipped > 1
        assert found.num_kept
        assert found.num_undone


@pytest.mark.parametrize("world_size", [1, 2])
def test_overflows_of_fp16_undo_the_step(world_size: int) -> None:
    simulate(_overflow, world_size)


def _spoil(ranks: SimulatedRanks) -> None:
    for stage, accumulation in itertools.product((1, 3), (1, 2)):
        run = Run(stage=stage, accumulation=accumulation, spoilt_rank=1, pace=1)
        found = both(run, ranks, 6)
        assert found.num_skipped == 1
        assert found.num_undone


def _take(ranks: SimulatedRanks) -> None:
    for dtype in ("fp32", "bf16"):
        top = {"check_grad_overflow": False}
        run = Run(dtype=dtype, spoilt_rank=0, clipping=1e9, pace=1, top=top)
        assert both(run, ranks, 5).num_skipped == 0


def test_nan_has_the_same_bits_where_no_step_is_skipped() -> None:
    simulate(_take, 2)


def test_nan_on_one_rank_skips_the_step_on_all() -> None:
    simulate(_spoil, 3)


def _limit(ranks: SimulatedRanks) -> None:
    kept = []
    clipping = median_norm(Run(accumulation=2), ranks, 10)
    for size in (1, 4_000, 9_000, None):
        offload = {"undo_buffer_size": size}
        run = Run(clipping=clipping, offload=offload, accumulation=2, pace=1)
        kept.append(both(run, ranks, 10).num_kept)
    assert kept[0] == 0
    assert kept[0] < kept[1] < kept[2] < kept[3]


def test_units_beyond_the_size_of_the_log_are_updated_late() -> None:
    simulate(_limit, 2)


def _shares(ranks: SimulatedRanks) -> None:
    clipping = median_norm(Run(stage=2), ranks, 10)
    for ratio, share in ((0.5, "last"), (0.3, "first"), (0.0, "last")):
        run = Run(clipping=clipping, offload={"ratio": ratio, "host_share": share}, stage=2)
        found = both(run, ranks, 10)
        assert (found.num_kept > 0) == (ratio > 0)
    # Which elements the host has depends on measurements.
    both(Run(clipping=clipping, offload={"ratio": "auto"}, stage=2), ranks, 30)


def test_the_hosts_part_of_a_share_is_updated_early_and_the_devices_late() -> None:
    simulate(_shares, 2)


def _repeat(ranks: SimulatedRanks) -> None:
    for dtype, stage in (("fp32", 1), ("bf16", 3)):
        both(Run(dtype=dtype, stage=stage, num_backwards=2, clipping=2.5), ranks, 6)


def test_a_further_backward_of_the_step_undoes_what_was_updated() -> None:
    simulate(_repeat, 2)


def _between(ranks: SimulatedRanks, folder: str) -> None:
    """Save, read states, clip by hand and change settings between backward and step."""
    run = Run(stage=2, dtype="bf16", clipping=1e9)
    found = []
    for is_early in (False, True):
        config = run.config(is_early=is_early)
        engine = zero_core.build(make_model(), config, process_group=ranks)
        for step in range(6):
            engine.backward(engine(**batch(step, 0, ranks.rank))["loss"])
            drain(engine)
            tier: Any = engine.sharded_state.tier
            assert (tier.parts[0].tier._speculation is not None) == is_early
            if step == 1:
                assert engine.states.get_full("blocks.0.up.weight", "exp_avg") is not None
            elif step == 2:
                engine.clip_grad_norm_(0.5)
            elif step == 3:
                engine.optimizer.param_groups[0]["lr"] = 0.03
            elif step == 4:
                engine.save_checkpoint(f"{folder}/{is_early}", f"step-{step}")
            engine.step()
        engine.save_checkpoint(f"{folder}/{is_early}", "end")
        found.append(states_of(engine))
        for tag in ("step-4", "end"):
            engine.load_checkpoint(f"{folder}/{is_early}", tag)
            found.append(states_of(engine))
        engine.close()
    for (late, late_scalars), (early, early_scalars) in zip(found[:3], found[3:], strict=True):
        assert early_scalars == late_scalars
        assert all(torch.equal(bits(early[name]), bits(value)) for name, value in late.items())


def test_whatever_is_done_between_backward_and_step_sees_no_update(tmp_path: Path) -> None:
    simulate(_between, 2, str(tmp_path))


class Breaking(nn.Module):
    """Its first block's backward raises an error once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.is_broken = False

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if index == 1 and self.is_broken:
                x.register_hook(self._fail)
        return x.square().mean()

    def _fail(self, grad: Tensor) -> None:
        raise ArithmeticError("broken on purpose")


def _break(ranks: SimulatedRanks) -> None:
    x = torch.ones(2, 16) * (ranks.rank + 1)
    for dtype in ("fp32", "bf16"):
        run = Run(dtype=dtype, clipping=1.0)
        engine = zero_core.build(Breaking(), run.config(is_early=True), process_group=ranks)
        for _ in range(2):
            engine.backward(engine(x))
            engine.step()
        before, scalars = states_of(engine)
        engine.module.is_broken = True
        with pytest.raises(ArithmeticError):
            engine.backward(engine(x))
        drain(engine)
        found, found_scalars = states_of(engine)
        assert num_undone(engine), "units were updated"
        assert found_scalars == scalars
        assert all(torch.equal(bits(found[name]), bits(value)) for name, value in before.items())
        engine.close()


def test_an_error_in_backward_leaves_the_state_as_it_was() -> None:
    simulate(_break, 1)


def test_after_an_error_in_backward_training_goes_on_with_the_same_bits() -> None:
    found = []
    x = torch.ones(2, 16)
    for is_early in (False, True):
        run = Run(clipping=1.0)
        engine = zero_core.build(Breaking(), run.config(is_early=is_early))
        for step in range(5):
            engine.module.is_broken = step == 2
            if step == 2:
                with pytest.raises(ArithmeticError):
                    engine.backward(engine(x))
                drain(engine)
                continue
            engine.backward(engine(x))
            engine.step()
        found.append(states_of(engine))
        engine.close()
    (late, late_scalars), (early, early_scalars) = found
    assert early_scalars == late_scalars
    assert all(torch.equal(bits(early[name]), bits(value)) for name, value in late.items())


def test_param_grad_may_be_read_and_changed() -> None:
    found = []
    for is_early in (False, True):
        engine = zero_core.build(make_model(), Run(stage=0).config(is_early=is_early))
        for step in range(4):
            engine.backward(engine(**batch(step, 0, 0))["loss"])
            drain(engine)
            param = engine.module.get_parameter("blocks.1.up.weight")
            assert param.grad is not None
            if step == 2:
                param.grad.mul_(0.25)
            engine.step()
        found.append(states_of(engine)[0])
        engine.close()
    late, early = found
    assert all(torch.equal(bits(early[name]), bits(value)) for name, value in late.items())


def test_parameters_keep_their_values_until_the_step() -> None:
    for dtype in ("fp32", "bf16"):
        engine = zero_core.build(make_model(), Run(dtype=dtype, stage=1).config(is_early=True))
        engine.backward(engine(**batch(0, 0, 0))["loss"])
        shards = [flat.read_shard().clone() for flat in engine.sharded_state.params]
        drain(engine)
        tier: Any = engine.sharded_state.tier
        assert tier.undo_bytes == engine.memory_report()["undo log"]
        for flat, shard in zip(engine.sharded_state.params, shards, strict=True):
            assert torch.equal(flat.read_shard(), shard)
        engine.step()
        engine.close()


def test_a_file_cannot_be_undone(tmp_path: Path) -> None:
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    with pytest.raises(zero_core.ConfigError, match="states in a file cannot be undone"):
        zero_core.build(make_model(), Run(offload=offload).config(is_early=True))


def test_an_optimizer_without_a_kernel_is_refused_where_it_is_demanded() -> None:
    model = make_model()
    config = Run().config(is_early=True)
    del config["optimizer"]
    with pytest.raises(zero_core.ConfigError, match="update_in_backward needs updates that can"):
        zero_core.build(model, config, optimizer=torch.optim.NAdam(model.parameters()))


def test_by_default_it_ends_where_most_steps_are_clipped_and_begins_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="zero_core.step.speculation")
    config = Run(clipping=1e-3).config(is_early=True)
    offload = {"device": "cpu", "undo_buffer_size": 1 << 20}
    config["zero_optimization"]["offload_optimizer"] = offload
    engine = zero_core.build(make_model(), config)
    for step in range(20):
        before = num_undone(engine)
        engine.backward(engine(**batch(step, 0, 0))["loss"])
        drain(engine)
        engine.step()
        drain(engine)
        assert (num_undone(engine) > before) == (step < 16)
    engine.close()
    messages = [record.getMessage() for record in caplog.records]
    assert "updated in backward, with" in messages[0]
    assert "after backward from now on: 100% of steps" in messages[1]


@pytest.mark.parametrize(("early_s", "late_s"), [(0.2, 0.3), (0.3, 0.2)])
def test_by_default_the_faster_way_stays(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    early_s: float,
    late_s: float,
) -> None:
    caplog.set_level("INFO", logger="zero_core.step.speculation")
    config = Run(clipping=1.0).config(is_early=False)
    engine = zero_core.build(make_model(), config)
    offload = {"device": "cpu", "undo_buffer_size": 1 << 20}
    config["zero_optimization"]["offload_optimizer"] = offload
    now = 0.0
    read = load_config(config, world_size=1)
    made = Speculation(read, engine.sharded_state.tier, rank=0)
    monkeypatch.setattr(speculation, "perf_counter", lambda: now)
    began: list[bool] = []

    def steps(count: int, *, is_undone: bool) -> None:
        nonlocal now
        for _ in range(count):
            is_alike = not began or began[-1] == made.is_on
            began.append(made.is_on)
            # The first step of a turn has what the other way left over.
            now += (early_s if made.is_on else late_s) if is_alike else 9.0
            made.note(is_undone=is_undone)

    steps(WINDOW + TRIAL, is_undone=False)
    assert 0 < sum(began[WINDOW:]) < TRIAL
    is_early = early_s < late_s
    assert made.is_on is is_early
    message = caplog.records[-1].getMessage()
    assert message.startswith(
        f"offloaded units are updated {'in' if is_early else 'after'} backward from now on: "
        f"a step took {early_s} s with updates in backward, {late_s} s after it"
    )
    steps(2 * WINDOW, is_undone=True)
    assert not made.is_on
    steps(WINDOW, is_undone=False)
    assert made.is_on is is_early, "the times still hold"
    engine.close()


def test_times_are_compared_once_few_steps_are_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Run(clipping=1.0).config(is_early=False)
    engine = zero_core.build(make_model(), config)
    config["zero_optimization"]["offload_optimizer"] = {
        "device": "cpu",
        "undo_buffer_size": 1 << 20,
    }
    now = itertools.count()
    tier = engine.sharded_state.tier
    made = Speculation(load_config(config, world_size=1), tier, rank=0)
    monkeypatch.setattr(speculation, "perf_counter", lambda: float(next(now)))
    for _ in range(2 * WINDOW):
        made.note(is_undone=True)
    assert next(now) == 0, "no step was timed"
    for _ in range(WINDOW + TRIAL):
        made.note(is_undone=False)
    assert next(now) == TRIAL + 1
    assert made.is_on, "of equal times"
    engine.close()


def test_without_a_size_of_the_log_the_default_waits_for_the_decision() -> None:
    config = Run(clipping=1.0).config(is_early=True)
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    engine = zero_core.build(make_model(), config)
    assert "undo log" not in engine.memory_report()
    engine.close()


@pytest.mark.parametrize("size", [None, 5_000])
@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_plan_has_the_bytes_of_the_log(dtype: str, state_dtype: str, size: int | None) -> None:
    offload = {"undo_buffer_size": size, "state_dtype": state_dtype}
    config = Run(dtype=dtype, offload=offload).config(is_early=True)
    engine = zero_core.build(make_model(), config)
    # On a CPU a plan has the host's bytes among its own.
    memory = zero_core.plan(make_model(), config, 1, device_type="cpu").memory
    planned = {**memory.device, **memory.host}["undo log"]
    assert planned == engine.memory_report()["undo log"]
    engine.close()


def test_a_plan_refuses_what_cannot_be_undone() -> None:
    config = Run().config(is_early=True)
    config["optimizer"] = {"type": "Adamax", "params": {"lr": 1e-2}}
    with pytest.raises(zero_core.ConfigError, match="updates of Adamax with these settings"):
        zero_core.plan(make_model(), config, 1, device_type="cpu")
