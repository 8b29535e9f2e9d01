"""The benchmark measures whoever is asked for, and says who cannot be measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from zero_engine.bench import engine as bench

TINY = ("--rounds=1", "--steps=1", "--warmup=1", "--layers=1", "--width=64", "--context=16")


def test_bench_writes_figures_that_agree(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "zero_engine.bench", "engine", *TINY),
            *("--only=ddp", "--only=zero-3", f"--output={tmp_path}"),
        ],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    contenders = json.loads((tmp_path / "engine.json").read_text())["contenders"]
    assert contenders["zero-3"]["median_s"] > 0
    assert contenders["zero-3"]["last_loss"] == pytest.approx(contenders["ddp"]["last_loss"])
    assert (tmp_path / "engine.png").stat().st_size > 0


def test_contender_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda _: None)
    assert bench._missing("deepspeed-3") == "deepspeed is not installed: pip install deepspeed"
    assert bench._missing("ddp") == ""
