"""The long convergence run can be broken off and taken up again, and says what it found."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from zero_core.errors import ConfigError
from zero_engine.bench import comm_convergence as bench
from zero_engine.bench.comm_convergence_report import bar_percent, summarize, table
from zero_engine.bench.comm_training import PLAIN, Job, Run
from zero_engine.bench.processes import RankError

SETTINGS = bench.Settings(steps=2, seeds=[0], dtypes=["bf16"], contenders=["hpZ"])


def _run(contender: str, held_out: float, *, seed: int = 0, **further: Any) -> Run:
    defaults = {
        "dtype": "bf16",
        "training": held_out,
        "curve": [held_out] * 2,
        "is_finite": True,
        "skipped_steps": 0,
        "within_node_bytes": 100,
        "between_nodes_bytes": 100,
        "seconds": 1.0,
    }
    return Run(contender=contender, held_out=held_out, seed=seed, **{**defaults, **further})


@pytest.fixture
def small_text(monkeypatch: pytest.MonkeyPatch, text_file: Path) -> None:
    monkeypatch.setattr(bench, "read_text", lambda _: text_file.read_text())


@pytest.mark.usefixtures("small_text")
def test_runs_that_are_there_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.compare(SETTINGS, output=tmp_path, should_resume=False)
    path = tmp_path / "comm_convergence.json"
    report = json.loads(path.read_text())
    plain, ours = (Run(**run) for run in report["runs"])
    assert (plain.contender, ours.contender) == (PLAIN, "hpZ")
    assert plain.held_out == ours.held_out  # exact weights, kept a second time
    assert ours.between_nodes_bytes < plain.between_nodes_bytes
    assert report["text"]["unigram_nats"] < plain.held_out  # after two steps nothing is learned
    assert report["summary"] == summarize([plain, ours], [])
    assert path.with_suffix(".png").stat().st_size > 0
    assert "2/2  bf16 seed 0 hpZ: held out" in capsys.readouterr().out

    def start(*_: object, **__: object) -> None:
        raise AssertionError("all runs were there")

    monkeypatch.setattr(bench, "run_ranks", start)
    bench.compare(SETTINGS, output=tmp_path, should_resume=True)
    assert json.loads(path.read_text()) == report


@pytest.mark.usefixtures("small_text")
def test_run_that_fails_leaves_the_others_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []
    broken = {"hpZ"}

    def start(_: str, arguments: list[str], *__: object, **___: object) -> list[Any]:
        jobs = json.loads(arguments[0])
        asked.append([job["contender"] for job in jobs])
        with Path(arguments[2]).open("a") as file:
            for job in jobs:
                if job["contender"] in broken:
                    raise RankError("the wire is cut", "all that was said")
                file.write(json.dumps(asdict(_run(job["contender"], 3.0))) + "\n")
        return []

    monkeypatch.setattr(bench, "run_ranks", start)
    settings = replace(SETTINGS, contenders=["hpZ", "qwZ"])
    bench.compare(settings, output=tmp_path, should_resume=False)
    assert asked == [[PLAIN, "hpZ", "qwZ"], ["qwZ"]]
    said = capsys.readouterr().out
    assert "bf16 seed 0 hpZ: failed: the wire is cut" in said
    assert "all that was said" in said
    broken.clear()
    bench.compare(settings, output=tmp_path, should_resume=True)
    assert asked[2:] == [["hpZ"]]
    runs = json.loads((tmp_path / "comm_convergence.json").read_text())["runs"]
    assert [run["contender"] for run in runs] == [PLAIN, "qwZ", "hpZ"]
    with pytest.raises(ConfigError, match="--resume: the settings of"):
        bench.compare(replace(settings, steps=3), output=tmp_path, should_resume=True)


def test_every_seed_must_be_within_its_bar() -> None:
    runs = [
        *(_run(PLAIN, 2.0, seed=seed, between_nodes_bytes=400) for seed in (0, 1, 2)),
        *(_run("qwZ", loss, seed=seed) for seed, loss in enumerate((2.0, 1.99, 2.021))),
        *(_run("qgZ", loss, seed=seed) for seed, loss in enumerate((2.0, 1.99, 2.021))),
        *(_run("hpZ", 2.0, seed=seed, is_finite=seed != 1) for seed in (0, 1, 2)),
        _run("4-bit", float("nan"), is_finite=False),
    ]
    rows = {row["contender"]: row for row in summarize(runs, [])}
    assert rows["qwZ"]["worst_percent"] == pytest.approx(1.05)
    assert rows["qwZ"]["median_percent"] == 0.0
    assert rows["qwZ"]["between_nodes_ratio"] == 4.0
    met = {name: row["is_met"] for name, row in rows.items()}
    assert met == {PLAIN: True, "qwZ": False, "qgZ": True, "hpZ": False, "4-bit": False}
    assert (bar_percent("qgZ"), bar_percent("qgZ, error feedback")) == (2.0, 1.0)


def test_a_bar_is_not_met_while_runs_that_were_asked_for_are_missing() -> None:
    runs = [_run(PLAIN, 2.0), _run(PLAIN, 2.0, seed=1), _run("qwZ", 2.0)]
    asked = [Job(name, "bf16", seed, 2) for name in (PLAIN, "qwZ", "hpZ") for seed in (0, 1)]
    rows = {row["contender"]: row for row in summarize(runs, asked)}
    assert {name: (row["is_met"], row["missing_seeds"]) for name, row in rows.items()} == {
        PLAIN: (True, []),
        "qwZ": (False, [1]),
        "hpZ": (False, [0, 1]),
    }
    console = Console(width=140, file=StringIO())
    console.print(table(runs, asked, 5.0))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1 missing" in next(line for line in said.splitlines() if "qwZ" in line)
    assert "missing" in next(line for line in said.splitlines() if "hpZ" in line)
