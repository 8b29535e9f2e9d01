"""Machine rates: built in for known devices, measured, and stored for plans."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import refusal_of
from typer.testing import CliRunner

from zero_engine.calibration import machine
from zero_engine.calibration.machine import (
    default_ranks,
    device_calibration,
    device_memory,
    device_names,
    fingerprint,
    first_failed,
    keep,
    kept_path,
    kept_rates,
)
from zero_engine.calibration.rank import EXCHANGED, exchanged
from zero_engine.cli import app
from zero_engine.planning import Calibration, Curve, Rates

MODEL = ("plan", "--layers=2", "--width=32", "--heads=2", "--vocab=64")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "kept_path", kept_path)


def rates_of_a_cpu() -> Calibration:
    free = Curve(((1.0, 1e-6),))
    names = ("memory.float32", "operator", "pass", "step", "matmul.float32")
    updates = ("update.device.float32", "update.host.float32")
    curves = dict.fromkeys((*names, *updates), free)
    return Calibration("a processor", "measured then, torch x", (Rates(1, 1, 1, curves),))


def planned(*options: str) -> tuple[dict[str, Any], str]:
    result = CliRunner().invoke(app, [*MODEL, "--micro-batch-size=2", "--json", *options])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), result.stderr


def test_measured_rates_are_kept_beside_the_output(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "measure_machine", lambda ranks, disk: rates_of_a_cpu())
    output = tmp_path / "rates.json"
    said = CliRunner().invoke(app, ["doctor", "--measure", f"--output={output}"]).output
    assert str(kept_path()) in said
    assert json.loads(output.read_text()) == json.loads(rates_of_a_cpu().to_json())
    assert kept_rates().calibration == rates_of_a_cpu()


@pytest.mark.parametrize(
    ("key", "which"), [("torch", "another torch"), ("processor", "another machine")]
)
def test_rates_of_another_machine_are_not_taken(key: str, which: str) -> None:
    path = keep(rates_of_a_cpu(), "rates.json")
    content = json.loads(path.read_text())
    content["machine"][key] = "other"
    path.write_text(json.dumps(content))
    found, said = planned()
    assert found["configured"]["step_time"] is None
    assert f"are of {which} ({key} other, here {fingerprint()[key]})" in said
    assert "zero-engine doctor --measure" in said


def test_a_bare_plan_takes_the_kept_rates_else_says_how_to_measure() -> None:
    content, said = planned()
    assert content["configured"]["step_time"] is None
    assert "no rates are kept" in said
    assert "zero-engine doctor --measure" in said
    keep(rates_of_a_cpu(), "rates.json")
    content, said = planned()
    assert content["configured"]["step_time"]["total_s"] > 0
    assert f"times by the rates kept in {kept_path()}, measured then" in said
    assert "1024 tokens a sample (--seq-length)" in said
    assert len(said.strip().splitlines()) == 1
    content, said = planned("--no-rates")
    assert content["configured"]["step_time"] is None
    assert not said


def test_rates_of_a_cpu_are_no_gpus() -> None:
    keep(rates_of_a_cpu(), "rates.json")
    content, said = planned("--device-memory=24GB")
    assert content["configured"]["step_time"] is None
    assert "the kept rates are a CPU's" in said


def test_damaged_rates_and_places_without_room_are_refused(tmp_path: Path) -> None:
    path = keep(rates_of_a_cpu(), "rates.json")
    path.write_text("{")
    assert "the kept rates" in refusal_of(*MODEL)
    path.unlink()
    path.parent.rmdir()
    path.parent.write_text("a file")
    with pytest.raises(Exception, match="cannot be kept in"):
        keep(rates_of_a_cpu(), "rates.json")


DTYPES = ("float32", "bfloat16")


def test_figures_are_in_the_units_of_their_keys() -> None:
    """Detect figures that are off by 1000 or that assume sparsity."""
    for name in device_names():
        assert 16e9 <= device_memory(name) <= 300e9, name
        curves = device_calibration(name, 1).rates[0].curves
        reached = [curves.get(f"matmul.{dtype}", curves["matmul.float32"]) for dtype in DTYPES]
        wide, narrow = (1e15 / curve.seconds(1e15) for curve in reached)
        assert 4e12 < wide <= narrow < 1.6e15, name
        assert 2e11 < 1e12 / curves["memory.float32"].seconds(1e12) < 7e12, name


def test_many_cores_take_bounded_memory() -> None:
    """At most 8 CPU ranks are measured by default. Gathers of more ranks take at most 512 MiB."""
    assert default_ranks(cores=128, devices=0) == {1, 2, 8}
    assert default_ranks(cores=1, devices=0) == {1}
    assert default_ranks(cores=128, devices=4) == {1, 4}
    assert exchanged(8, is_host=True) == list(EXCHANGED)
    for ranks in (16, 64, 512):
        assert max(exchanged(ranks, is_host=True)) * ranks**2 <= 2**29


def test_the_rank_that_failed_first_is_the_error() -> None:
    """Rank 0 would wait for the failed rank until a collective times out."""
    programs = ("import time; time.sleep(600)", "raise SystemExit(3)")
    started = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    try:
        assert first_failed(started, 300.0) == 1
        with pytest.raises(TimeoutError):
            first_failed(started[:1], 0.1)
    finally:
        for process in started:
            process.kill()
            process.wait()
