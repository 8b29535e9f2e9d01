"""Checkpoints that were made up, with the right checksums: no load takes what `verify` refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_core
from zero_core import CheckpointCorruptError, CheckpointError
from zero_core.checkpoint.manifest import BUFFERS, MANIFEST, seal
from zero_core.checkpoint.safetensors_files import read_header
from zero_core.checkpoint.save import write_file

_Edit = Callable[[Path, dict[str, Any]], None]


def _build(optimizer: str) -> zero_core.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.register_parameter("empty", nn.Parameter(torch.empty(0)))
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": optimizer, "params": {"lr": 0.1}},
        "fp16": {"enabled": True},
    }
    return zero_core.build(model, config)


def _train(engine: zero_core.Engine) -> None:
    engine.backward(engine(torch.ones(3, 6).cumsum(0)).float().square().mean())
    engine.step()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of checkpoints of AdamW and of Muon."""
    folders = {}
    for optimizer in ("AdamW", "Muon"):
        engine = _build(optimizer)
        for _ in range(2):
            _train(engine)
        folders[optimizer] = tmp_path_factory.mktemp(optimizer)
        engine.save_checkpoint(folders[optimizer])
        engine.close()
    return folders


def _make_up(source: Path, folder: Path, edit: _Edit) -> None:
    """Copy a checkpoint, and seal it again after ``edit`` of its folder and manifest."""
    shutil.copytree(source, folder)
    (place,) = (path for path in folder.iterdir() if path.is_dir())
    content = json.loads((place / MANIFEST).read_bytes())
    edit(place, content)
    (place / MANIFEST).write_bytes(seal(content))


def _write(place: Path, content: dict[str, Any], name: str, tensors: dict[str, Any]) -> None:
    (place / name).unlink()
    content["files"] |= write_file(place, name, tensors)


def _no_moment(place: Path, content: dict[str, Any]) -> None:
    _write(place, content, "exp_avg_sq-00000.safetensors", {})


def _short_moment(place: Path, content: dict[str, Any]) -> None:
    name = "exp_avg-00000.safetensors"
    found = read_header(place / name)
    _write(place, content, name, {k: t.value()[:-1] for k, t in found.items()})


def _no_numbers(place: Path, content: dict[str, Any]) -> None:
    del content["scalars"]["0.weight"]


def _no_whole_tensor(place: Path, content: dict[str, Any]) -> None:
    _write(place, content, "whole-00000.safetensors", {})


def _other_structure(place: Path, content: dict[str, Any]) -> None:
    content["whole_states"]["0.weight"]["state"] = {"__items__": [["momentum", {"__call__": 1}]]}


def _no_random_state(place: Path, content: dict[str, Any]) -> None:
    _write(place, content, "rng-00000.safetensors", {"torch": torch.zeros(5, dtype=torch.uint8)})


def _buffer_of_a_parameter(place: Path, content: dict[str, Any]) -> None:
    found = {key: stored.value() for key, stored in read_header(place / BUFFERS).items()}
    _write(place, content, BUFFERS, {**found, "0.weight": torch.zeros(4, 6)})


def _steps(place: Path, content: dict[str, Any]) -> None:
    content["progress"]["global_steps"] = -1


def _loss_scale(place: Path, content: dict[str, Any]) -> None:
    content["progress"]["loss_scaler"]["scale"] = 0.0


def _no_groups(place: Path, content: dict[str, Any]) -> None:
    content["progress"]["param_groups"] = {"lr": 0.1}


def _no_schedule(place: Path, content: dict[str, Any]) -> None:
    del content["progress"]["lr_scheduler"]


def _client_state(place: Path, content: dict[str, Any]) -> None:
    content["client_state"] = {"__tuple__": [1]}


_OF_ADAM = (
    *(_no_moment, _short_moment, _no_numbers, _no_random_state, _buffer_of_a_parameter),
    *(_steps, _loss_scale, _no_groups, _no_schedule, _client_state),
)
_OF_MUON = (_no_whole_tensor, _other_structure)


@pytest.mark.parametrize(
    ("optimizer", "edit"),
    [*(("AdamW", edit) for edit in _OF_ADAM), *(("Muon", edit) for edit in _OF_MUON)],
)
def test_what_no_engine_can_load_is_not_whole(saved, tmp_path, optimizer, edit):
    _make_up(saved[optimizer], tmp_path / "made-up", edit)
    with pytest.raises(CheckpointCorruptError):
        zero_core.verify_checkpoint(tmp_path / "made-up")
    _refuses_and_stays(_build(optimizer), tmp_path / "made-up")


def _refuses_and_stays(engine: zero_core.Engine, folder: Path) -> None:
    """Require that a load changes nothing: the next save has the bytes of one before."""
    _train(engine)
    before = engine.save_checkpoint(folder / "own", "before")
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(folder)
    after = engine.save_checkpoint(folder / "own", "after")
    engine.close()
    files = json.loads((before / MANIFEST).read_bytes())["files"]
    assert json.loads((after / MANIFEST).read_bytes())["files"] == files


@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_what_was_saved_is_whole(saved, optimizer):
    assert zero_core.verify_checkpoint(saved[optimizer])


def _number_missing(place: Path, content: dict[str, Any]) -> None:
    del content["scalars"]["2.bias"]["step"]


def _number_for_a_moment(place: Path, content: dict[str, Any]) -> None:
    content["scalars"]["2.bias"]["exp_avg"] = 0.5


def _further_state(place: Path, content: dict[str, Any]) -> None:
    name = "exp_avg-00000.safetensors"
    tensors = {key: stored.value() for key, stored in read_header(place / name).items()}
    content["states"].append("max_exp_avg_sq")
    content["files"] |= write_file(place, name.replace("exp_avg", "max_exp_avg_sq"), tensors)


@pytest.mark.parametrize("edit", [_number_missing, _number_for_a_moment, _further_state])
def test_numbers_and_states_that_the_optimizer_does_not_have_are_refused(saved, tmp_path, edit):
    _make_up(saved["AdamW"], tmp_path / "made-up", edit)
    _refuses_and_stays(_build("AdamW"), tmp_path / "made-up")


def _export(folder: Path, **options: Any) -> None:
    zero_core.export_checkpoint(folder, folder.with_name("hf"), **options)


@pytest.mark.parametrize("read", [zero_core.verify_checkpoint, _export])
def test_a_checkpoint_that_goes_while_it_is_read_is_not_said_to_be_damaged(saved, tmp_path, read):
    folder = tmp_path / "run"
    shutil.copytree(saved["AdamW"], folder)

    def remove(done: int, total: int) -> None:
        (folder / "step-2").rename(folder / "gone")

    with pytest.raises(CheckpointError, match="removed or replaced while") as caught:
        read(folder, progress=remove)
    assert not isinstance(caught.value, CheckpointCorruptError)
    assert not any((tmp_path / "hf").glob("*"))
