"""The long convergence run can be interrupted and resumed."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.experiments import comm_convergence as bench
from benchmarks.experiments.comm_convergence import (
    PLAIN,
    Training,
    bar_percent,
    section,
    summarize,
)
from benchmarks.harness import text
from benchmarks.harness.ranks import RankError, Row
from zero_core.errors import ConfigError

OPTIONS: dict[str, Any] = {"steps": 2, "seeds": 1, "dtypes": ["bf16"]}


def _run(contender: str, held_out: float, *, seed: int = 0, **further: Any) -> Row:
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
    about = {"contender": contender, "held_out": held_out, "seed": seed}
    return {**about, **defaults, **further}


@pytest.fixture
def small_text(monkeypatch: pytest.MonkeyPatch, text_file: Path) -> None:
    monkeypatch.setattr(text, "read_text", lambda _: text_file.read_text())


@pytest.mark.usefixtures("small_text", "forked_ranks")
def test_runs_that_are_there_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, number in (("NUM_RANKS", 2), ("RANKS_PER_NODE", 1)):  # as few as have a network
        monkeypatch.setattr(bench, name, number)
    bench.main(**OPTIONS, contenders=[PLAIN], output=tmp_path)
    path = tmp_path / "comm_convergence.json"
    report = json.loads(path.read_text())
    (plain,) = report["runs"]
    assert (plain["contender"], plain["dtype"], plain["seed"]) == (PLAIN, "bf16", 0)
    assert plain["is_finite"]
    assert len(plain["curve"]) == OPTIONS["steps"]
    assert plain["between_nodes_bytes"] > 0
    assert report["text"]["unigram_nats"] < plain["held_out"]  # after two steps nothing is learned
    assert report["summary"] == summarize([plain], [])
    assert path.with_suffix(".png").stat().st_size > 0
    assert "1/1  bf16 seed 0 plain: held out" in capsys.readouterr().out

    def start(*_: object, **__: object) -> None:
        raise AssertionError("all runs were there")

    monkeypatch.setattr(bench, "run_ranks", start)
    bench.main(**OPTIONS, contenders=[PLAIN], resume=True, output=tmp_path)
    assert json.loads(path.read_text()) == report


@pytest.mark.usefixtures("small_text")
def test_run_that_fails_leaves_the_others_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    broken = {"hpZ"}

    def start(_: str, arguments: dict[str, Any], *__: object, **___: object) -> list[Row]:
        name = arguments["job"].contender
        asked.append(name)
        if name in broken:
            raise RankError("the wire is cut", "the ranks' output")
        return [_run(name, 3.0)]

    monkeypatch.setattr(bench, "run_ranks", start)
    options = {**OPTIONS, "contenders": ["hpZ", "qwZ"], "output": tmp_path}
    bench.main(**options)
    assert asked == [PLAIN, "hpZ", "qwZ"]
    said = capsys.readouterr().out
    assert "bf16 seed 0 hpZ: failed: the wire is cut" in said
    assert "the ranks' output" in said
    broken.clear()
    bench.main(**options, resume=True)
    assert asked[3:] == ["hpZ"]
    runs = json.loads((tmp_path / "comm_convergence.json").read_text())["runs"]
    assert [run["contender"] for run in runs] == [PLAIN, "qwZ", "hpZ"]
    with pytest.raises(ConfigError, match="--resume: the settings of"):
        bench.main(**{**options, "steps": 3}, resume=True)


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
    asked = [Training(name, "bf16", seed, 2) for name in (PLAIN, "qwZ", "hpZ") for seed in (0, 1)]
    rows = {row["contender"]: row for row in summarize(runs, asked)}
    assert {name: (row["is_met"], row["missing_seeds"]) for name, row in rows.items()} == {
        PLAIN: (True, []),
        "qwZ": (False, [1]),
        "hpZ": (False, [0, 1]),
    }
    console = Console(width=140, file=StringIO())
    console.print(section(summarize(runs, asked), 5.0).table)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1 missing" in next(line for line in said.splitlines() if "qwZ" in line)
    assert "missing" in next(line for line in said.splitlines() if "hpZ" in line)
