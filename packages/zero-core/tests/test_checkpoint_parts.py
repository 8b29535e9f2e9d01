"""Checkpoints with a part left out, read without an engine, and models given to one rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from former_checkpoints import rewrite
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, SequentialLR, StepLR

import zero_core
from zero_core import CheckpointError
from zero_core.checkpoint.files import read_weights
from zero_core.checkpoint.json_values import decode, encode
from zero_core.optim.schedules.factory import WarmupLR
from zero_core.optim.train_state import TrainState
from zero_core.testing import Case, SimulatedRanks, batch, make_model, simulate

WEIGHTS_ALONE = ("optimizer", "lr_scheduler", "progress")


def _build(
    stage: int, accumulation: int = 1, process_group: SimulatedRanks | None = None, **top: Any
) -> zero_core.Engine:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
    case = Case(stage, accumulation=accumulation, top={"scheduler": scheduler, **top})
    return zero_core.build(make_model(), case.config(), process_group=process_group)


def _train(engine: zero_core.Engine, steps: int) -> None:
    for step in range(steps):
        engine.backward(engine(**batch(step, 0, engine.rank))["loss"])
        engine.step()


def _values(engine: zero_core.Engine) -> dict[str, torch.Tensor]:
    return engine.full_state_dict(dtype=torch.float32)


def _check_parts(ranks: SimulatedRanks, folder: str) -> None:
    first = _build(3, process_group=ranks)
    _train(first, 3)
    first.save_checkpoint(folder, "whole")
    first.save_checkpoint(folder, "light", has_frozen=False, is_latest=False)
    expected = _values(first)
    saved_rate = first.optimizer.param_groups[0]["lr"]
    first.close()
    moments = {}
    for without in ((), ("optimizer",), ("lr_scheduler",), ("progress",), WEIGHTS_ALONE):
        engine = _build(2, process_group=ranks)
        _train(engine, 1)
        rate = engine.optimizer.param_groups[0]["lr"]
        place, _ = engine.load_checkpoint(folder, without=without)
        assert place.name == "whole"
        assert all(torch.equal(v, expected[n]) for n, v in _values(engine).items()), without
        assert engine.global_steps == (1 if "progress" in without else 3)
        assert rate != saved_rate
        expected_rate = rate if without == WEIGHTS_ALONE else saved_rate
        assert engine.optimizer.param_groups[0]["lr"] == expected_rate
        assert engine.lr_scheduler is not None
        count = engine.lr_scheduler.state_dict()["last_batch_iteration"]
        assert count == (0 if "lr_scheduler" in without else 2)
        moments[without] = engine.states.get_full("embed.weight", "exp_avg")
        engine.close()
    assert torch.equal(moments[()], moments[("progress",)])
    assert not torch.equal(moments[()], moments[("optimizer",)])
    _check_frozen(ranks, folder, expected)


def _check_frozen(ranks: SimulatedRanks, folder: str, expected: dict[str, torch.Tensor]) -> None:
    engine = _build(1, process_group=ranks)
    with pytest.raises(CheckpointError, match="without the values of frozen parameters"):
        engine.load_checkpoint(folder, "light")
    with pytest.raises(CheckpointError, match="a checkpoint's parts are"):
        engine.load_checkpoint(folder, without=("everything",))
    own = {n: v for n, v in _values(engine).items() if n.startswith("frozen")}
    engine.load_checkpoint(folder, "light", without=("frozen",))
    for name, value in _values(engine).items():
        assert torch.equal(value, own.get(name, expected[name])), name
    engine.close()


def test_load_leaves_out_what_it_is_told_to(tmp_path: Path) -> None:
    simulate(_check_parts, 2, str(tmp_path))
    assert (tmp_path / "latest").read_text() == "whole"
    by_name = {n: w for w in read_weights(tmp_path) for n in w.names}
    assert by_name["head.weight"].value is by_name["embed.weight"].value
    assert not by_name["frozen.0.up.weight"].is_trainable
    light = {n for w in read_weights(tmp_path, "light") for n in w.names}
    assert {n for n in by_name if not n.startswith("frozen")} == light


def _check_one_rank(ranks: SimulatedRanks) -> None:
    engine = _build(3, process_group=ranks)
    everywhere = engine.full_state_dict()
    found = engine.full_state_dict(rank=1)
    assert found.keys() == (everywhere.keys() if ranks.rank == 1 else set())
    assert all(torch.equal(value, everywhere[name]) for name, value in found.items())
    assert engine.states.has_gradient() is False
    loss = engine(**batch(0, 0, ranks.rank))["loss"]
    engine.backward(loss)
    assert engine.states.has_gradient() is True
    engine.step()
    assert engine.states.has_gradient() is False
    engine.close()


def test_whole_model_is_given_to_one_rank_and_gradients_are_there_between_backward_and_step() -> (
    None
):
    simulate(_check_one_rank, 2)


def test_number_of_micro_steps_changes_between_steps_only() -> None:
    engine = _build(0, accumulation=2)
    _train(engine, 1)
    with pytest.raises(RuntimeError, match="1 micro-steps of a step are done"):
        engine.gradient_accumulation_steps = 3
    _train(engine, 1)
    engine.gradient_accumulation_steps = 3
    _train(engine, 3)
    assert engine.global_steps == 2
    with pytest.raises(ValueError, match="expected 1 or more"):
        engine.gradient_accumulation_steps = 0
    engine.close()


_OLDER = {"base_lrs": [1e-2], "last_epoch": 3, "_step_count": 4, "lr_lambdas": [None]}
"""A schedule's state after 3 steps in the form of torch's LambdaLR, which these once were."""


def _rewrite_schedule(folder: Path, state: dict[str, Any]) -> None:
    rewrite(folder / "step-3", lambda content: content["progress"].update(lr_scheduler=state))


def test_schedule_saved_in_torchs_form_goes_on_at_the_same_step(tmp_path: Path) -> None:
    first = _build(0)
    _train(first, 3)
    first.save_checkpoint(tmp_path)
    _rewrite_schedule(tmp_path, _OLDER)
    second = _build(0)
    second.load_checkpoint(tmp_path)
    _train(first, 1)
    _train(second, 1)
    rates = [e.optimizer.param_groups[0]["lr"] for e in (first, second)]
    assert rates[0] == rates[1]
    assert second.lr_scheduler is not None
    assert second.lr_scheduler.state_dict() == {"last_batch_iteration": 3}


def _build_with(make_schedule: Callable[[torch.optim.Optimizer], Any]) -> zero_core.Engine:
    model = make_model()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    schedule = make_schedule(optimizer)
    return zero_core.build(model, Case().config(), optimizer=optimizer, lr_scheduler=schedule)


_STEPS = {"step_size": 2, "gamma": 0.1, "base_lrs": [1e-2], "last_epoch": 3}
"""A state of torch's StepLR."""


@pytest.mark.parametrize(
    ("make_schedule", "saved"),
    [
        (lambda o: WarmupLR(o, warmup_num_steps=10), {"num_bad_epochs": 0}),
        (lambda o: StepLR(o, 2), {"num_bad_epochs": 0}),
        (lambda o: StepLR(o, 2), {**_STEPS, "base_lrs": [1e-2, 1e-3]}),
        (lambda o: LambdaLR(o, lambda step: 1 / (step + 1)), _STEPS),
        (lambda o: SequentialLR(o, [StepLR(o, 3), StepLR(o, 5)], [4]), _STEPS),
        (
            lambda o: SequentialLR(o, [StepLR(o, 3), CosineAnnealingLR(o, 5)], [4]),
            {"last_epoch": 3, "_schedulers": [_STEPS, _STEPS]},
        ),
    ],
    ids=["warm-up", "steps", "groups", "lambda", "parts", "within-parts"],
)
def test_schedule_that_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, make_schedule: Callable[[torch.optim.Optimizer], Any], saved: dict[str, Any]
) -> None:
    first = _build_with(lambda o: WarmupLR(o, warmup_num_steps=10))
    _train(first, 3)
    first.save_checkpoint(tmp_path)
    _rewrite_schedule(tmp_path, saved)
    second = _build_with(make_schedule)
    before = _values(second)
    with pytest.raises(CheckpointError, match=r'without=\("lr_scheduler",\)'):
        second.load_checkpoint(tmp_path)
    assert second.global_steps == 0
    assert all(torch.equal(v, before[n]) for n, v in _values(second).items())
    second.load_checkpoint(tmp_path, without=("lr_scheduler",))
    assert second.global_steps == 3


@pytest.mark.parametrize(
    "scheduler",
    [
        {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 4}},
        {"type": "OneCycle", "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2}},
        {"type": "CosineAnnealingLR", "params": {"T_max": 12}},
    ],
    ids=lambda scheduler: scheduler["type"],
)
def test_schedule_goes_on_with_its_rates_where_the_optimizer_starts_anew(
    tmp_path: Path, scheduler: dict[str, Any]
) -> None:
    straight = _build(0, scheduler=scheduler)
    _train(straight, 3)
    straight.save_checkpoint(tmp_path)
    lion = {"type": "Lion", "params": {"lr": 1e-2}}
    resumed = _build(0, scheduler=scheduler, optimizer=lion)
    resumed.load_checkpoint(tmp_path, without=("optimizer",))
    for _ in range(3):
        groups = [engine.optimizer.param_groups[0] for engine in (straight, resumed)]
        assert groups[1]["lr"] == groups[0]["lr"]
        if scheduler["type"] == "OneCycle":
            assert groups[1]["betas"] == groups[0]["betas"]
        for engine in (straight, resumed):
            _train(engine, 1)


def test_a_schedule_that_only_the_checkpoint_or_the_engine_has_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [_build(0, scheduler=None), _build(0)]
    for number, told in ((0, "stays where it is: none was saved"), (1, "the engine has none")):
        place = tmp_path / str(number)
        engines[number].save_checkpoint(place)
        for loading in engines:
            loading.load_checkpoint(place)
        (line,) = caplog.messages  # of the engine that differs, and not of the other
        assert told in line
        assert line.endswith("load without the schedule"), "front ends name arguments otherwise"
        caplog.clear()
        engines[1 - number].load_checkpoint(place, without=("lr_scheduler",))
        assert not caplog.messages


def _weights_alone(ranks: SimulatedRanks, folder: str) -> None:
    first = _build(3, process_group=ranks)
    _train(first, 2)
    first.save_checkpoint(folder)
    expected = _values(first)
    other = _build(2, optimizer={"type": "Lion", "params": {"lr": 1e-3}}, process_group=ranks)
    with pytest.raises(CheckpointError, match=r'same optimizer; load without=\("optimizer", "lr'):
        other.load_checkpoint(folder)
    other.load_checkpoint(folder, without=WEIGHTS_ALONE)
    assert all(torch.equal(v, expected[n]) for n, v in _values(other).items())
    assert other.optimizer.param_groups[0]["lr"] != first.optimizer.param_groups[0]["lr"]
    assert other.global_steps == 0
    _train(other, 1)
    model = make_model()  # the other way round: what was frozen is trained, and the reverse
    for name, param in model.named_parameters():
        param.requires_grad_(name.startswith("frozen"))
    tuned = zero_core.build(model, Case(3).config(), process_group=ranks)
    tuned.load_checkpoint(folder, without=WEIGHTS_ALONE)
    assert all(torch.equal(v, expected[n]) for n, v in _values(tuned).items())
    for stage, dtype in ((0, "fp32"), (3, "bf16")):
        config = Case(stage, dtype).config()
        evaluated = zero_core.build(make_model(), config, is_training=False, process_group=ranks)
        state = torch.get_rng_state()
        evaluated.load_checkpoint(folder)
        assert torch.equal(torch.get_rng_state(), state)
        rounded = first.full_state_dict(dtype=evaluated.layout.params[0].dtype)
        found = evaluated.full_state_dict()
        assert all(torch.equal(v, rounded[n]) for n, v in found.items())
        loss = evaluated(**batch(0, 0, ranks.rank))["loss"]
        if dtype == "fp32":
            with torch.no_grad():
                assert torch.equal(loss, first(**batch(0, 0, ranks.rank))["loss"])


def test_weights_alone_go_to_another_optimizer_other_frozen_parameters_and_an_evaluation(
    tmp_path: Path,
) -> None:
    simulate(_weights_alone, 2, str(tmp_path))


def test_weights_without_elements_are_read_and_a_rank_that_is_none_is_refused(
    tmp_path: Path,
) -> None:
    model = torch.nn.Linear(3, 3)
    model.register_parameter("empty", torch.nn.Parameter(torch.empty(0, 3)))
    model.register_parameter("low", torch.nn.Parameter(torch.empty(0).half(), requires_grad=False))
    engine = zero_core.build(model, Case().config())
    engine.save_checkpoint(tmp_path)
    by_name = {w.names[0]: w.value for w in read_weights(tmp_path)}
    assert by_name["empty"].shape == (0, 3)
    assert by_name["low"].dtype is torch.float16
    assert by_name.keys() == {"weight", "bias", "empty", "low"}
    with pytest.raises(ValueError, match="rank = 7: expected a rank below 1"):
        engine.full_state_dict(rank=7)


def _save_empty_last(ranks: SimulatedRanks, folder: str) -> None:
    model = torch.nn.Linear(3, 3)
    model.register_parameter("last", torch.nn.Parameter(torch.empty(0, 3)))
    engine = zero_core.build(model, Case(3).config(), process_group=ranks)
    engine.save_checkpoint(folder)


def test_empty_parameter_behind_the_first_ranks_slice_is_read(tmp_path: Path) -> None:
    simulate(_save_empty_last, 2, str(tmp_path))
    assert {w.names[0]: tuple(w.value.shape) for w in read_weights(tmp_path)} == {
        "weight": (3, 3),
        "bias": (3,),
        "last": (0, 3),
    }


def test_a_rate_that_is_a_tensor_stays_the_object_that_a_captured_graph_reads() -> None:
    rate = torch.tensor(0.5)
    config = zero_core.load_config(Case().config(), world_size=1)
    train = TrainState(config, [{"params": [], "lr": rate}], None, rank=0)
    saved = json.loads(json.dumps(encode(train.state_dict(), "state")))
    rate.fill_(0.25)
    train.load_state_dict(decode(saved))
    assert train.hyperparameters()[0]["lr"] is rate
    assert rate.item() == 0.5


def _export_fails(ranks: SimulatedRanks, folder: str) -> None:
    engine = zero_core.build(make_model(), Case(stage=3).config(), process_group=ranks)
    if ranks.rank == 1:
        last = engine.sharded_state.params[-1]

        def fail() -> torch.Tensor:
            raise OSError("the disk under rank 1 is gone")

        last.read_shard = fail  # type: ignore[method-assign]
    engine.export_safetensors(folder)


def test_an_export_that_one_rank_cannot_gather_ends_with_that_ranks_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="the disk under rank 1 is gone"):
        simulate(_export_fails, 2, str(tmp_path))
