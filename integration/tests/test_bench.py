"""The benchmark measures whoever is asked for, and says who cannot be measured."""

from __future__ import annotations

import importlib
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zero_engine.bench import cpu_adam as host_adam
from zero_engine.bench import measured

TINY = ("--rounds=1", "--steps=1", "--warmup=1", "--size=1x64", "--ranks=2", "--context=16")


def test_bench_writes_figures_that_agree(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "zero_engine.bench", "engine", *TINY),
            *("--only=ddp", "--only=zero-3", "--stage=3", f"--output={tmp_path}"),
        ],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "engine.json").read_text())
    (run,) = report["runs"]
    contenders = run["contenders"]
    assert contenders["zero-3"]["median_s"] > 0
    assert contenders["zero-3"]["last_loss"] == pytest.approx(contenders["ddp"]["last_loss"])
    assert (tmp_path / "engine.png").stat().st_size > 0
    python = report["python"]["stage 3"]
    assert python["python_us"] > 0
    assert any(name.startswith("flow.py") for name in python["functions_us"])


def test_contender_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured.importlib.util, "find_spec", lambda _: None)
    assert measured.missing("deepspeed-3") == "deepspeed is not installed: pip install deepspeed"
    assert measured.missing("ddp") == ""


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
    others = [row for name, row in race.items() if name.startswith("cpu-adam, ")]
    assert all(row["bar"] is None for row in others)  # 1000 elements are in every cache
    assert race["DeepSpeedCPUAdam"] == {
        "failure": "deepspeed is not installed: pip install deepspeed"
    }
    assert "deepspeed is not installed" in capsys.readouterr().out
    assert (tmp_path / "cpu_adam.png").stat().st_size > 0


def test_convergence_bench_sets_narrow_states_beside_wide_ones(tmp_path: Path) -> None:
    steps = 6
    done = subprocess.run(
        [
            *(sys.executable, "-m", "zero_engine.bench", "cpu_adam_convergence"),
            *(f"--steps={steps}", "--seeds=1", "--threads=1", f"--output={tmp_path}"),
        ],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "cpu_adam_convergence.json").read_text())
    (sides,) = report["seeds"]
    assert list(sides) == ["float32", "int8", "bfloat16", "torch"]
    wide, oracle = sides["float32"], sides["torch"]
    # All start from the same weights and are given the same text; only fp32 weights round less.
    assert wide["losses"][0] == sides["int8"]["losses"][0] == sides["bfloat16"]["losses"][0]
    assert wide["losses"][0] == pytest.approx(oracle["losses"][0], rel=1e-3)
    for name, side in sides.items():
        assert side["losses"][-1] < side["losses"][0], name
        assert side["training"]["loss"] == pytest.approx(statistics.fmean(side["losses"]))
        assert side["losses"][-1] == pytest.approx(oracle["losses"][-1], rel=1e-2), name
        for kind in ("training", "held_out"):
            loss, difference = side[kind]["loss"], side[kind]["to_float32_percent"]
            assert loss == pytest.approx(wide[kind]["loss"] * (1 + difference / 100))
            assert side[kind].get("is_met") == (
                abs(difference) <= report["bar_percent"] if name in ("int8", "bfloat16") else None
            )
        assert report["mean"][name] == {kind: side[kind] for kind in ("training", "held_out")}
    assert sides["int8"]["losses"][-1] != wide["losses"][-1]  # they are not one and the same
    assert f"step {steps}/{steps}  seed 0" in done.stdout
    assert (tmp_path / "cpu_adam_convergence.png").stat().st_size > 0
