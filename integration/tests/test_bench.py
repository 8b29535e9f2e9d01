"""The benchmark measures whoever is asked for, and says who cannot be measured."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zero_engine.bench import cpu_adam as host_adam
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


def test_host_adam_bench_measures_who_is_there_and_names_who_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_peers(name: str, package: str | None = None) -> Any:
        if name.startswith(("deepspeed", "torchao", "bitsandbytes")):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return import_module(name, package)

    import_module = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", without_peers)
    monkeypatch.setattr(host_adam, "NUM_SMALL", 3)
    settings = host_adam.Settings(numels=(1000,), rounds=1, rest_s=0.0, threads=1)
    host_adam.compare(settings, output=tmp_path)
    races = json.loads((tmp_path / "cpu_adam.json").read_text())["races"]
    race = races["fp32 AdamW, 1000"]
    assert race["cpu-adam"]["median_s"] > 0
    assert race["torch for-loop"]["to_ours"] > 0
    assert race["DeepSpeedCPUAdam"] == {
        "failure": "deepspeed is not installed: pip install deepspeed"
    }
    assert "deepspeed is not installed" in capsys.readouterr().out
    assert (tmp_path / "cpu_adam.png").stat().st_size > 0
