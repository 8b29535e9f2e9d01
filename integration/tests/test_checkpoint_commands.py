"""``zero-engine verify | inspect | export | prune``: codes, JSON, and errors of one line."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import zero_core
from zero_engine import checkpoints
from zero_engine.cli import app


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    engine = zero_core.build(nn.Linear(3, 2), config)
    for tag in ("step-0", "best"):
        engine.save_checkpoint(folder, tag)
    engine.close()
    return folder


def _run(*words: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def test_prune_shows_that_it_is_under_way(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    monkeypatch.setattr(checkpoints, "working", lambda what: nullcontext(shown.append(what)))
    assert _run("prune", saved, "--keep-last", 1, "--dry-run")[0] == 0
    assert shown == ["looking for checkpoints"]


def test_whole_checkpoint_is_verified_inspected_and_exported(saved: Path, tmp_path: Path) -> None:
    code, text, _ = _run("verify", saved, "--json")
    assert (code, json.loads(text)["is_whole"]) == (0, True)
    code, text, _ = _run("inspect", saved, "--tag", "step-0", "--json")
    assert (code, json.loads(text)["elements"]) == (0, 8)
    assert "best" in _run("inspect", saved)[1]
    code, text, _ = _run("export", saved, tmp_path / "hf", "--dtype", "float16")
    assert (code, set(load_file(tmp_path / "hf" / "model.safetensors"))) == (0, {"weight", "bias"})
    code, text, _ = _run("prune", saved, "--keep-last", 1, "--dry-run", "--json")
    assert (code, json.loads(text)["removed"]) == (0, [])


def test_damage_is_code_1_and_one_line(saved: Path) -> None:
    path = saved / "best" / "buffers.safetensors"
    data = path.read_bytes()
    path.write_bytes(data + b"x")
    code, _, error = _run("verify", saved)
    assert (code, error.count("\n")) == (1, 1)
    assert "is damaged" in error
    assert json.loads(_run("verify", saved, "--json")[1])["is_corrupt"] is True
    path.write_bytes(data)
