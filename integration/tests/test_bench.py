"""The benchmark measures whoever is asked for, and says who cannot be measured."""

from __future__ import annotations

import importlib
import json
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from zero_engine.bench import cpu_adam as host_adam
from zero_engine.bench import measured, offload, processes
from zero_engine.bench.workload import Workload

TINY = ("--rounds=1", "--steps=1", "--warmup=1", "--size=1x64", "--ranks=1", "--context=16")


def test_bench_writes_figures_that_agree(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "zero_engine.bench", "engine", *TINY),
            *("--only=ddp", "--only=zero-3", "--stage=3", f"--output={tmp_path}"),
        ],
        capture_output=True,
        text=True,
        timeout=600,
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


def test_offload_bench_sets_states_off_the_device_beside_the_bare_model(tmp_path: Path) -> None:
    names = ("bare", "zero-2-offload", "zero-3-offload")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "zero_engine.bench", "offload", *TINY),
            *(*(f"--only={name}" for name in names), f"--output={tmp_path}"),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = json.loads((tmp_path / "offload.json").read_text())["runs"]
    rows = run["contenders"]
    assert list(rows) == list(names)
    for name in names[1:]:
        row = rows[name]
        assert row["overhead_s"] == pytest.approx(row["median_s"] - rows["bare"]["median_s"])
        assert row["added_mib_per_rank"] > 0
        assert row["is_loss_exact"] is True
        assert row["overhead_to_rival"] is None  # DeepSpeed was not asked for
        assert row["overlap"] is None  # no files
    assert rows["zero-2-offload"]["last_loss"] == rows["zero-3-offload"]["last_loss"]
    assert rows["bare"]["last_loss"] != rows["zero-2-offload"]["last_loss"]  # nothing is updated
    assert (tmp_path / "offload.png").stat().st_size > 0
    assert "zero-3-offload" in done.stdout.partition("written to")[2]  # the table comes last


def side(name: str, times_s: list[float], mib: int, loss: float, **counted: float) -> Any:
    sizes = [mib * 2**20]
    found = measured.Measured(name, times_s, sizes, counted=counted, last_loss=loss)
    found.num_rounds = 1
    return found


def test_offload_bench_holds_each_against_deepspeed_at_its_stage() -> None:
    results = [
        side("bare", [1.0, 0.9], 100, 9.0),
        side("deepspeed-2-offload", [2.0, 1.9], 500, 5.0),
        side("deepspeed-3-offload", [3.0, 2.9], 400, 5.00001),
        side("zero-2-offload", [1.4, 1.1], 400, 5.0),
        side("zero-3-nvme", [1.4, 1.4], 100, 5.1, io_s=10.0, stall_s=1.5),
        side("zero-3-offload", [1.0, 1.0], 100, 5.0),
        side("zero-3-int8", [2.0, 2.0], 200, 5.2),
        measured.Measured("zero-2-nvme", failure="failed: the disk is full"),
    ]
    rows = offload._rows(results)
    assert rows["zero-2-offload"]["overhead_to_rival"] == pytest.approx(0.3)
    assert rows["zero-2-offload"]["min_overhead_to_rival"] == pytest.approx(0.2)
    assert rows["zero-2-offload"]["memory_to_rival"] == pytest.approx(0.8)
    assert rows["zero-3-nvme"]["overhead_to_rival"] == pytest.approx(0.45 / 2.0)
    assert rows["zero-3-nvme"]["overlap"] == pytest.approx(0.85)
    assert rows["zero-3-nvme"]["hidden"] == pytest.approx(1 - 0.4 / 5.0)  # 5 s of files a step
    assert rows["zero-2-nvme"] == {"failure": "failed: the disk is full"}
    exact = {name: row.get("is_loss_exact") for name, row in rows.items()}
    assert exact == {
        "bare": None,  # it updates nothing
        "deepspeed-2-offload": True,
        "deepspeed-3-offload": True,
        "zero-2-offload": True,
        "zero-3-nvme": False,
        "zero-3-offload": True,
        "zero-3-int8": None,  # its states are rounded
        "zero-2-nvme": None,
    }


def test_contender_that_fails_keeps_its_last_words(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = Workload(
        layers=1, width=64, context=16, micro_batch=1, ranks=1, threads=1, steps=1, warmup=0
    )
    result = measured.Measured("nobody")
    measured.run_round(tiny, result)
    assert "KeyError: 'nobody'" in result.failure
    assert "Traceback" in capsys.readouterr().err


def test_ranks_that_take_too_long_are_ended() -> None:
    endless = Workload(
        layers=1, width=64, context=16, micro_batch=1, ranks=1, threads=1, steps=10**9, warmup=0
    )
    arguments = ["bare", json.dumps(asdict(endless))]
    with pytest.raises(processes.RankError, match="ended after 1 s"):
        processes.run_ranks(
            "zero_engine.bench.worker", arguments, 1, processes.CPU_ALONE, limit_s=1.0
        )


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
        timeout=600,
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
