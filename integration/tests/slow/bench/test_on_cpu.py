"""The experiments on the CPU run whole, tiny, and their figures agree."""

from __future__ import annotations

import importlib
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import command
from benchmarks.experiments import (
    cpu_adam,
    cpu_adam_convergence,
    engine,
    memory,
    offload,
    offload_files,
)
from benchmarks.harness import text
from benchmarks.harness.job import Job
from benchmarks.harness.models import GptShape
from benchmarks.harness.ranks import Row

pytestmark = pytest.mark.usefixtures("forked_ranks")
TINY = ("--rounds=1", "--steps=1", "--warmup=1", "--size=1x64", "--ranks=1", "--context=16")


def run(name: str, *arguments: str) -> str:
    """Return what the experiment prints."""
    done = CliRunner().invoke(command(name), arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def _quick_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of the same shape that takes no seconds to import."""
    monkeypatch.setattr(engine, "MODEL", "plain")


@pytest.mark.usefixtures("_quick_model")
def test_engine_bench_writes_figures_that_agree(tmp_path: Path) -> None:
    names = ("--only=ddp", "--only=zero-3")
    run("engine", *TINY, *names, "--stage=3", f"--output={tmp_path}")
    report = json.loads((tmp_path / "engine.json").read_text())
    (only,) = report["runs"]
    assert only["workload"] == {
        "layers": 1,
        "width": 64,
        "context": 16,
        "micro_batch": 2,
        "ranks": 1,
        "threads": 1,
        "steps": 1,
        "warmup": 1,
    }
    rows = only["contenders"]
    assert rows["zero-3"]["median_s"] > 0
    assert rows["zero-3"]["last_loss"] == pytest.approx(rows["ddp"]["last_loss"])
    assert rows["zero-3"]["added_mib_per_rank"] > 0
    assert (tmp_path / "engine.png").stat().st_size > 0
    python = report["python"]["stage 3"]
    assert python["python_us"] > 0
    assert sum(python["functions_us"].values()) > 0


@pytest.mark.usefixtures("_quick_model")
def test_offload_bench_sets_states_in_files_beside_the_bare_model(tmp_path: Path) -> None:
    names = ("bare", "zero-2-nvme", "zero-3-offload")
    said = run("offload", *TINY, *(f"--only={name}" for name in names), f"--output={tmp_path}")
    (only,) = json.loads((tmp_path / "offload.json").read_text())["runs"]
    rows = only["contenders"]
    assert list(rows) == list(names)
    for name in names[1:]:
        row = rows[name]
        assert row["overhead_s"] == pytest.approx(row["median_s"] - rows["bare"]["median_s"])
        assert row["is_loss_exact"] is True
        assert row["overhead_to_rival"] is None  # DeepSpeed was not asked for
    assert rows["zero-3-offload"]["overlap"] is None  # no files
    assert rows["zero-2-nvme"]["counted"]["io_s"] > 0
    assert rows["zero-2-nvme"]["overlap"] <= 1
    assert rows["zero-2-nvme"]["last_loss"] == rows["zero-3-offload"]["last_loss"]
    assert rows["bare"]["last_loss"] != rows["zero-2-nvme"]["last_loss"]  # nothing is updated
    assert sorted(path.name for path in tmp_path.iterdir()) == ["offload.json", "offload.png"]
    assert "zero-3-offload" in said.partition("written to")[2]  # the table is last


@pytest.mark.usefixtures("_quick_model")
def test_offload_bench_counts_the_bytes_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks have matrices above `stage3_param_persistence_threshold`."""
    monkeypatch.setattr(offload_files, "MODEL", "plain")
    names = ("zero-files", "zero-files-vertical", "zero-host")
    some = (*(f"--only={name}" for name in names), "--accumulation=1", "--accumulation=2")
    shape = ("--size=2x192" if option.startswith("--size") else option for option in TINY)
    run("offload", *shape, "--warmup=2", *some, f"--output={tmp_path}")
    report = json.loads((tmp_path / "offload.json").read_text())
    assert report["runs"] == []
    one, two = (only["contenders"] for only in report["off_device"]["runs"])
    assert list(one) == ["zero-files", "zero-host"]
    assert list(two) == list(names)
    for rows in (one, two):
        for name, row in rows.items():
            is_in_files = "files" in name
            assert row["read_to_closed_form"] == (1 if is_in_files else None), name
            assert row["written_to_closed_form"] == (1 if is_in_files else None), name
            assert row["step_to_rival"] is None  # DeepSpeed was not asked for
            assert row["is_loss_close"] is True
    assert len({row["last_loss"] for row in two.values()}) == 1


def test_offload_bench_compares_with_the_best_of_deepspeed() -> None:
    found = {
        "deepspeed-files-5": side([3.0], 400, 5.0, disk_read_bytes=0, disk_written_bytes=0),
        "deepspeed-files-32": side([2.0], 500, 5.0, disk_read_bytes=0, disk_written_bytes=0),
        "zero-files": side(
            [1.0], 200, 5.1, disk_read_bytes=2**20, disk_written_bytes=0, read_bytes=0
        ),
        "zero-host": {"failure": "failed"},
    }
    blocks = [20, 30, 50, 80, 130, 210, 340]  # docs/offload.md has the form
    found["zero-files"]["shard_bytes"] = [10, *blocks]
    before, first = sum(blocks[2:6]), sum(blocks[:4])
    found["zero-files"]["counted"] |= {
        "read_bytes": 4 * (10 + 2 * 860 - 340 - before) - 3 * first + 3 * 870,
        "written_bytes": 2 * 4 * 870,
    }
    shape = GptShape(layers=1, width=64, heads=1, vocab=8, context=16)
    job = Job("", "", shape, micro_batch=1, steps=1, accumulation=4)
    rows = offload_files.compared(found, job)
    row = rows["zero-files"]
    assert row["step_to_rival"] == pytest.approx(0.5)
    assert row["memory_to_rival"] == pytest.approx(0.5)
    assert row["read_to_closed_form"] == 1
    assert row["written_to_closed_form"] == 2
    assert row["disk_read_mib"] == 1
    assert row["is_loss_close"] is True
    assert rows["deepspeed-files-5"]["is_loss_close"] is False
    assert rows["deepspeed-files-5"]["step_to_rival"] is None
    assert offload_files.section(job, rows).table.row_count == 3


def side(times_s: list[float], mib: float, loss: float, **counted: float) -> Row:
    return {
        "median_s": statistics.median(times_s),
        "min_s": min(times_s),
        "added_mib_per_rank": mib,
        "last_loss": loss,
        "times_s": times_s,
        "counted": counted,
        "shard_bytes": [],
    }


def test_offload_bench_compares_with_deepspeed_at_the_same_stage() -> None:
    found = {
        "bare": side([1.0, 0.9], 100, 9.0),
        "deepspeed-2-offload": side([2.0, 1.9], 500, 5.0),
        "deepspeed-3-offload": side([3.0, 2.9], 400, 5.00001),
        "zero-2-offload": side([1.4, 1.1], 400, 5.0),
        "zero-3-nvme": side([1.4, 1.4], 100, 5.1, io_s=10.0, stall_s=1.5),
        "zero-3-offload": side([1.0, 1.0], 100, 5.0),
        "zero-3-int8": side([2.0, 2.0], 200, 5.2),
        "zero-2-nvme": {"failure": "failed: the disk is full"},
    }
    shape = GptShape(layers=1, width=64, heads=1, vocab=8, context=16)
    rows = offload.compared(found, Job("", "", shape, micro_batch=1, steps=2, warmup=0))
    assert rows["zero-2-offload"]["overhead_to_rival"] == pytest.approx(0.3)
    assert rows["zero-2-offload"]["min_overhead_to_rival"] == pytest.approx(0.2)
    assert rows["zero-2-offload"]["memory_to_rival"] == pytest.approx(0.8)
    assert rows["zero-3-nvme"]["overhead_to_rival"] == pytest.approx(0.45 / 2.0)
    assert rows["zero-3-nvme"]["overlap"] == pytest.approx(0.85)
    assert rows["zero-3-nvme"]["hidden"] == pytest.approx(1 - 0.4 / 5.0)  # 5 s of files a step
    assert rows["zero-2-nvme"] == {"failure": "failed: the disk is full"}
    assert {name: row.get("is_loss_exact") for name, row in rows.items()} == {
        "bare": None,  # it updates nothing
        "deepspeed-2-offload": True,
        "deepspeed-3-offload": True,
        "zero-2-offload": True,
        "zero-3-nvme": False,
        "zero-3-offload": True,
        "zero-3-int8": None,  # its states are rounded
        "zero-2-nvme": None,
    }
    assert offload.section("t", rows).table.row_count == 7


def test_memory_bench_compares_peaks_with_formula_and_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = GptShape(layers=2, width=64, heads=1, vocab=64, context=8)
    job = Job("", "zero", tiny, micro_batch=1, steps=1, warmup=0, ranks=1)
    monkeypatch.setattr(memory, "SMALL", job)
    monkeypatch.setattr(memory, "GROWTH_STEPS", (1, 2))
    growth, about = memory.PARTS["growth"]
    monkeypatch.setitem(memory.PARTS, "growth", (lambda: first_of(growth()), about))
    run("memory", "--only=growth", f"--output={tmp_path}")
    (row,) = json.loads((tmp_path / "memory.json").read_text())["parts"]["growth"]
    assert row["case"] == "stage 0"
    assert row["held_bytes"] >= 16 * tiny.numel  # fp32 weights, gradients and two moments
    assert row["ratio"] == (row["late_bytes"] - row["early_bytes"]) / row["held_bytes"]
    assert (tmp_path / "memory.png").stat().st_size > 0


def first_of(rows: Iterator[Row]) -> Iterator[Row]:
    yield next(rows)


@pytest.mark.parametrize(
    ("stage", "accumulated", "expected"), [(0, None, 16), (3, None, 8), (0, 4, 20), (3, 4, 9)]
)
def test_bytes_per_parameter_follow_the_paper(
    stage: int, accumulated: int | None, expected: float
) -> None:
    assert memory._bytes_per_parameter(stage, 2, accumulated) == expected


def test_host_adam_bench_measures_the_installed_and_names_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_peers(name: str, package: str | None = None) -> Any:
        if name.startswith(("deepspeed", "torchao", "bitsandbytes")):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return import_module(name, package)

    program = command("cpu_adam")
    import_module = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", without_peers)
    monkeypatch.setattr(cpu_adam, "NUM_SMALL", 3)
    options = ("--numel=1000", "--rounds=1", "--rest-ms=0", "--threads=1", f"--output={tmp_path}")
    done = CliRunner().invoke(program, options, catch_exceptions=False)
    races = json.loads((tmp_path / "cpu_adam.json").read_text())["races"]
    race = races["fp32 AdamW, 1000"]
    assert race["cpu-adam"]["median_s"] > 0
    assert race["torch for-loop"]["to_ours"] > 0
    others = [row for name, row in race.items() if name.startswith("cpu-adam, ")]
    assert all(row["bar"] is None for row in others)  # 1000 elements are in every cache
    failure = "deepspeed is not installed: pip install deepspeed"
    assert race["DeepSpeedCPUAdam"] == {"failure": failure}
    assert failure in done.stdout
    assert (tmp_path / "cpu_adam.png").stat().st_size > 0


def test_convergence_bench_sets_narrow_states_beside_wide_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text_file: Path
) -> None:
    monkeypatch.setattr(text, "read_text", lambda _: text_file.read_text())
    monkeypatch.setattr(cpu_adam_convergence, "HELD_OUT_WINDOWS", 16)
    steps = 4
    said = run(
        "cpu_adam_convergence",
        f"--steps={steps}",
        "--seeds=1",
        "--threads=1",
        f"--output={tmp_path}",
    )
    report = json.loads((tmp_path / "cpu_adam_convergence.json").read_text())
    (sides,) = report["seeds"]
    assert list(sides) == ["float32", "int8", "bfloat16", "torch"]
    wide, oracle = sides["float32"], sides["torch"]
    # All start from the same weights and see the same text; only fp32 weights round less.
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
    assert f"step {steps}/{steps}  seed 0" in said
    assert (tmp_path / "cpu_adam_convergence.png").stat().st_size > 0


def test_patches_bench_sets_a_log_beside_none(tmp_path: Path) -> None:
    sizes = ("--size=1x64", "--context=16", "--ranks=2", "--turns=2", "--versions=2")
    run("patches", *sizes, f"--output={tmp_path}")
    figures = json.loads((tmp_path / "patches.json").read_text())["figures"]
    assert figures["step_s"] > 0
    assert 0 < figures["log"] < 0.1
    assert 0 < figures["share"] < 0.1
    assert figures["patch_s"] > 0
