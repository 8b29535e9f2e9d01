"""The schedule in virtual time: steps stay near their bounds, and the faults of before show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import command
from benchmarks.experiments.schedule.job import Job, Mode, Times, Variant
from benchmarks.experiments.schedule.program import BAR, TAIL_BAR_S


def _tail(times: Times, mode: Mode, ratio: float, step_s: float) -> float:
    return step_s - times.bound_s(mode, ratio) - times.last_unit_s(mode, ratio)


@pytest.mark.parametrize("mode", ["in backward", "after the decision"])
@pytest.mark.parametrize("ratio", [1.0, 0.4])
def test_a_step_takes_its_bound_and_a_short_tail(mode: Mode, ratio: float) -> None:
    """10.3 B parameters on one device, see ``docs/offload.md``."""
    times = Times()
    step_s = Job(times, mode, ratio, chunks_per_block=6).run()
    assert step_s <= BAR * times.bound_s(mode, ratio)
    assert _tail(times, mode, ratio, step_s) <= TAIL_BAR_S


@pytest.mark.parametrize(
    ("variant", "ratio", "least"),
    [
        (Variant("first", is_fifo=True, is_hasty=True), 1.0, 1.4),
        (Variant("first"), 0.4, 1.3),
        (Variant(is_fifo=True), 1.0, 1.1),
        (Variant(is_hasty=True), 1.0, 1.2),
    ],
)
def test_each_fault_of_before_is_seen(variant: Variant, ratio: float, least: float) -> None:
    times = Times(blocks=24)
    step_s = Job(times, "in backward", ratio, variant, chunks_per_block=6).run()
    assert step_s >= least * times.bound_s("in backward", ratio)


def test_auto_finds_a_ratio_near_the_best() -> None:
    times = Times(blocks=16)
    job = Job(times, "in backward", "auto", chunks_per_block=4)
    ratio = job.settle()
    assert 0.3 < ratio < 0.6
    found_s = Job(times, "in backward", ratio, chunks_per_block=4).run()
    assert found_s <= BAR * times.bound_s("in backward", ratio)


def test_schedule_bench_writes_rows_and_lanes(tmp_path: Path) -> None:
    arguments = ("--only=random", "--draws=1", f"--output={tmp_path}")
    done = CliRunner().invoke(command("schedule"), arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "schedule.json").read_text())
    rows = report["parts"]["random"]
    assert {row["ratio"] for row in rows} == {1.0, 0.4}
    for row in rows:
        assert row["over_bound"] == row["step_s"] / row["bound_s"] >= 0.99
