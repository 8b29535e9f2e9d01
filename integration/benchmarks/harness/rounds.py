"""Contenders in turn: every round runs each once, in fresh processes, one at a time.

So slow moments of the machine fall on all of them, and each one's memory is its own.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from benchmarks.harness.job import Job
from benchmarks.harness.ranks import CPU_ALONE, RankError, Row, Runner, run_ranks
from benchmarks.harness.sides import NEEDS
from zero_engine.train.metrics import MIB

Say = Callable[[str], object]
R = TypeVar("R", bound=Mapping[str, object])


def take_turns(
    jobs: Sequence[Job], rounds: int, run: Callable[[Job], Row], say: Say
) -> dict[str, list[Row]]:
    """Return the rows of every contender, by round. One without figures is not tried again.

    Args:
        jobs: the contenders, in the order of every round.
        rounds: times that each is measured.
        run: measures one, once.
        say: takes a line as each begins.
    """
    found: dict[str, list[Row]] = {job.name: [] for job in jobs}
    for number in range(rounds):
        for job in jobs:
            rows = found[job.name]
            if rows and not has_figures(rows[-1]):
                continue  # it failed, or the time was over: it would again
            say(f"round {number + 1}/{rounds}: {job.name}")
            reason = missing(job.side)
            rows.append({"failure": reason} if reason else run(job))
    return found


def has_figures(row: Mapping[str, object]) -> bool:
    """Return whether the row's case was measured."""
    return not {"failure", "skipped"} & set(row)


def measured(rows: Mapping[str, R]) -> dict[str, R]:
    """Return the rows with figures."""
    return {name: row for name, row in rows.items() if has_figures(row)}


def missing(side: str) -> str:
    """Return why a side cannot be measured here, or an empty text."""
    needed = NEEDS.get(side)
    if needed is None or importlib.util.find_spec(needed) is not None:
        return ""
    return f"{needed} is not installed: pip install {needed}"


def quotient(value: float | None, other: float | None) -> float | None:
    """Return ``value / other``, or None where a figure is missing or the other not positive."""
    return value / other if value is not None and other is not None and other > 0 else None


def race_on_device(jobs: Sequence[Job], rounds: int, runner: Runner, say: Say) -> dict[str, Row]:
    """Return a row per job of `benchmarks.harness.train.on_device`: medians over the rounds.

    The first round is traced.
    """
    traced = set()

    def run(job: Job) -> Row:
        is_first = job.name not in traced
        traced.add(job.name)
        return start_on_device(job, runner, num_traced=job.num_traced if is_first else 0)

    found = take_turns(jobs, rounds, run, say)
    return {name: _medians(rows) for name, rows in found.items()}


def start_on_device(job: Job, runner: Runner, **changed: object) -> Row:
    """Measure a job once, in a fresh process."""
    return runner.start("benchmarks.harness.train:on_device", job=vars(job) | changed)


def _medians(rows: Sequence[Row]) -> Row:
    """Return the first round with the medians of all."""
    found = [row for row in rows if "step_s" in row]
    if not found:
        return rows[-1]
    times = [row["step_s"] for row in found]
    speeds = [row["tokens_per_s"] for row in found]
    medians = {"step_s": statistics.median(times), "tokens_per_s": statistics.median(speeds)}
    return {**found[0], **medians, "steps_s": times}


def race_on_cpu(
    jobs: Sequence[Job], rounds: int, say: Say, run: Callable[[Job], Row] | None = None
) -> dict[str, Row]:
    """Return a row per job of `benchmarks.harness.train.on_cpu`, all rounds in one.

    ``times_s`` are those of rank 0, ``added_bytes`` each rank's and round's peak over what it had
    before the model; ``last_loss`` is the mean over ranks, on which contenders that do the same
    work agree; ``counted`` is summed.
    """
    found = take_turns(
        jobs, rounds, run or run_on_cpu, lambda line: say(f"{jobs[0].title}: {line}")
    )
    return {name: _added_up(rows) for name, rows in found.items()}


def run_on_cpu(job: Job) -> Row:
    """Measure a job's ranks once. A failure prints what they wrote."""
    environment = {**CPU_ALONE, "OMP_NUM_THREADS": str(job.threads)}
    target = "benchmarks.harness.train:on_cpu"
    try:
        ranks = run_ranks(target, {"job": job}, job.ranks, environment)
    except RankError as error:
        print(error.log, file=sys.stderr)
        return {"failure": f"failed: {error}"}
    return {
        "times_s": ranks[0]["times_s"],
        "added_bytes": [rank["peak_bytes"] - rank["before_bytes"] for rank in ranks],
        "last_loss": statistics.fmean(rank["losses"][-1] for rank in ranks),
        "counted": _sums(rank["counted"] for rank in ranks),
    }


def _added_up(rows: Sequence[Row]) -> Row:
    if not has_figures(rows[-1]):
        return rows[-1]
    times = [seconds for row in rows for seconds in row["times_s"]]
    added = [num_bytes for row in rows for num_bytes in row["added_bytes"]]
    return {
        "median_s": statistics.median(times),
        "min_s": min(times),
        "added_mib_per_rank": statistics.median(added) / MIB,
        "last_loss": rows[-1]["last_loss"],
        "times_s": times,
        "added_bytes": added,
        "counted": _sums(row["counted"] for row in rows),
    }


def _sums(counted: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for one in counted:
        for name, value in one.items():
            total[name] = total.get(name, 0.0) + value
    return total
