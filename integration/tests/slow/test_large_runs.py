"""Runs of `zero-engine train --size`: states in memory and in files, stopped and resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def _train(output: Path, *options: str) -> str:
    command = [sys.executable, "-m", "zero_engine", "train", "--output", str(output), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _losses(output: Path) -> list[float]:
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [entry.get("loss", entry.get("held_out_loss")) for entry in map(json.loads, lines)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_in_files_and_a_resumed_run_have_the_same_losses(ranks: int, tmp_path: Path) -> None:
    options = ("--size", "1m", f"--ranks={ranks}", "--context=32", "--no-export")
    memory, files, parts = (tmp_path / name for name in ("memory", "files", "parts"))
    shown = _train(memory, *options, "--steps=3")
    assert shown.startswith("plan: 0.00 billion parameters, states in memory, memory per rank:")
    assert "states in files" in _train(files, *options, "--steps=3", "--states=files")
    assert _losses(memory) == _losses(files)
    _train(parts, *options, "--steps=1", "--states=files")
    resumed = _train(parts, "--steps=3", "--resume")
    assert "plan:" not in resumed
    assert _losses(parts)[-3:] == _losses(files)[-3:]
    assert {path.name for path in files.iterdir()} == {
        *("checkpoint", "config.resolved.json", "data", "loss.png", "memory.png"),
        *("metrics.jsonl", "records", "tensorboard", ".lock", ".launchers.json"),
    }
