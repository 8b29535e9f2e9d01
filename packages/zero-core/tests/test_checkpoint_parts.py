"""Checkpoints with a part left out, read without an engine, and models given to one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_core
from zero_core import CheckpointError
from zero_core.checkpoint_files import read_weights
from zero_core.testing import Case, batch, make_model, spawn


def _build(stage: int, accumulation: int = 1, **top: Any) -> zero_core.Engine:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
    case = Case(stage, accumulation=accumulation, top={"scheduler": scheduler, **top})
    return zero_core.build(make_model(), case.config())


def _train(engine: zero_core.Engine, steps: int) -> None:
    for step in range(steps):
        engine.backward(engine(**batch(step, 0, engine.rank))["loss"])
        engine.step()


def _values(engine: zero_core.Engine) -> dict[str, torch.Tensor]:
    return engine.full_state_dict(dtype=torch.float32)


def _check_parts(rank: int, world_size: int, folder: str) -> None:
    first = _build(3)
    _train(first, 3)
    first.save_checkpoint(folder, "whole")
    first.save_checkpoint(folder, "light", has_frozen=False, is_latest=False)
    expected = _values(first)
    first.close()
    moments = {}
    for without in ((), ("optimizer",), ("lr_scheduler",), ("progress",)):
        engine = _build(2)
        _train(engine, 1)
        rate = engine.optimizer.param_groups[0]["lr"]
        place, _ = engine.load_checkpoint(folder, without=without)
        assert place.name == "whole"
        assert all(torch.equal(v, expected[n]) for n, v in _values(engine).items()), without
        assert engine.global_steps == (1 if "progress" in without else 3)
        assert (engine.optimizer.param_groups[0]["lr"] == rate) == ("optimizer" in without)
        assert engine.lr_scheduler is not None
        count = engine.lr_scheduler.state_dict()["last_batch_iteration"]
        assert count == (0 if "lr_scheduler" in without else 2)
        moments[without] = engine.states.get_full("embed.weight", "exp_avg")
        engine.close()
    assert torch.equal(moments[()], moments[("progress",)])
    assert not torch.equal(moments[()], moments[("optimizer",)])
    _check_frozen(folder, expected)


def _check_frozen(folder: str, expected: dict[str, torch.Tensor]) -> None:
    engine = _build(1)
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
    spawn(_check_parts, 2, str(tmp_path))
    assert (tmp_path / "latest").read_text() == "whole"
    by_name = {n: w for w in read_weights(tmp_path) for n in w.names}
    assert by_name["head.weight"].value is by_name["embed.weight"].value
    assert not by_name["frozen.0.up.weight"].is_trainable
    light = {n for w in read_weights(tmp_path, "light") for n in w.names}
    assert {n for n in by_name if not n.startswith("frozen")} == light


def _check_one_rank(rank: int, world_size: int) -> None:
    engine = _build(3)
    everywhere = engine.full_state_dict()
    found = engine.full_state_dict(rank=1)
    assert found.keys() == (everywhere.keys() if rank == 1 else set())
    assert all(torch.equal(value, everywhere[name]) for name, value in found.items())
    assert engine.states.has_gradient() is False
    loss = engine(**batch(0, 0, rank))["loss"]
    engine.backward(loss)
    assert engine.states.has_gradient() is True
    engine.step()
    assert engine.states.has_gradient() is False
    engine.close()


def test_whole_model_is_given_to_one_rank_and_gradients_are_there_between_backward_and_step() -> (
    None
):
    spawn(_check_one_rank, 2)


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
    manifest = folder / "step-3" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["progress"]["lr_scheduler"] = state
    manifest.write_text(json.dumps(content))


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


@pytest.mark.parametrize("kind", ["WarmupLR", "StepLR"])
def test_schedule_that_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, kind: str
) -> None:
    first = _build(0)
    _train(first, 3)
    first.save_checkpoint(tmp_path)
    _rewrite_schedule(tmp_path, {"num_bad_epochs": 0})
    params = {"warmup_num_steps": 10} if kind == "WarmupLR" else {"step_size": 2}
    second = _build(0, scheduler={"type": kind, "params": params})
    before = _values(second)
    with pytest.raises(CheckpointError, match=r'without=\("lr_scheduler",\)'):
        second.load_checkpoint(tmp_path)
    assert second.global_steps == 0
    assert all(torch.equal(v, before[n]) for n, v in _values(second).items())
    second.load_checkpoint(tmp_path, without=("lr_scheduler",))
    assert second.global_steps == 3
