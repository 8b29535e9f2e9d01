"""Rounds in which every contender runs once, so that slow moments of the machine affect all.

Jobs run one at a time in fresh processes, so that memory is measured per job.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.harness.job import Job
from benchmarks.harness.memory import MIB
from benchmarks.harness.ranks import HERE, Node, Row, Runner
from benchmarks.harness.sides import NEEDS


def take_turns(
    names: Sequence[str], rounds: int, run: Callable[[str, int], Row]
) -> dict[str, list[Row]]:
    """Run each contender once per round. Return each contender's rows by round."""
    found: dict[str, list[Row]] = {name: [] for name in names}
    for number in range(rounds):
        for name, rows in found.items():
            # A contender that failed or ran out of time is not tried again.
            if not rows or has_figures(rows[-1]):
                rows.append(run(name, number))
    return found


def race(jobs: Sequence[Job], rounds: int, run: Callable[[Job, int], Row]) -> dict[str, list[Row]]:
    """Run jobs in turn, see `take_turns`. A job whose side needs a missing package fails."""
    by_name = {job.name: job for job in jobs}

    def run_named(name: str, number: int) -> Row:
        print(f"round {number + 1}/{rounds}: {name}", flush=True)
        reason = missing(by_name[name].side)
        return {"failure": reason} if reason else run(by_name[name], number)

    return take_turns(list(by_name), rounds, run_named)


def race_on_device(jobs: Sequence[Job], rounds: int, runner: Runner) -> dict[str, Row]:
    """Run jobs on the accelerator in turn. Return a row per job.

    ``step_s`` and ``tokens_per_s`` are medians over the rounds, and ``steps_s`` has each round's
    step time. All other figures are from the first round. Only that round is traced.
    """

    def run(job: Job, number: int) -> Row:
        return start_on_device(job if number == 0 else replace(job, num_traced=0), runner)

    rows = {}
    for name, by_round in race(jobs, rounds, run).items():
        found = [row for row in by_round if "step_s" in row]
        rows[name] = dict((found or by_round)[0])
        if found:
            for key in ("step_s", "tokens_per_s"):
                rows[name][key] = statistics.median(row[key] for row in found)
            rows[name]["steps_s"] = [row["step_s"] for row in found]
    return rows


def start_on_device(job: Job, runner: Runner) -> Row:
    return runner.start("benchmarks.harness.train:on_device", {"job": job})[0]


def race_on_cpu(jobs: Sequence[Job], rounds: int, runner: Runner) -> dict[str, Row]:
    """Run jobs on the CPU in turn. Return a row per job over all rounds.

    ``times_s`` are rank 0's. ``added_bytes`` has each rank's and round's peak minus the memory
    before the model was made. ``last_loss`` is the mean over ranks. ``counted`` is summed over
    ranks and rounds.
    """
    print(jobs[0].title)

    def run(job: Job, _: int) -> Row:
        return start_ranks("benchmarks.harness.train:on_cpu", {"job": job}, job, runner)

    return {name: _added_up(rows) for name, rows in race(jobs, rounds, run).items()}


def start_ranks(
    target: str,
    arguments: Mapping[str, Any],
    job: Job,
    runner: Runner,
    nodes: Sequence[Node] = (HERE,),
) -> Row:
    ranks = runner.start(target, arguments, job.ranks, threads=job.threads, nodes=nodes)
    return {"ranks": ranks} if has_figures(ranks[0]) else ranks[0]


def _added_up(rounds: Sequence[Row]) -> Row:
    if not has_figures(rounds[-1]):
        return rounds[-1]
    by_round = [row["ranks"] for row in rounds]
    ranks = [rank for ranks in by_round for rank in ranks]
    added = [rank["added_bytes"] for rank in ranks]
    counted: Counter[str] = Counter()
    for rank in ranks:
        counted.update(rank["counted"])
    times = [seconds for ranks in by_round for seconds in ranks[0]["times_s"]]
    return {
        **spread(times),
        "added_mib_per_rank": statistics.median(added) / MIB,
        "last_loss": statistics.fmean(rank["losses"][-1] for rank in by_round[-1]),
        "times_s": times,
        "added_bytes": added,
        "counted": counted,
    }


def spread(times_s: Sequence[float]) -> Row:
    return {"median_s": statistics.median(times_s), "min_s": min(times_s)}


def has_figures(row: Mapping[str, object]) -> bool:
    return not {"failure", "skipped"} & set(row)


def measured(rows: Mapping[str, Row]) -> dict[str, Row]:
    return {name: row for name, row in rows.items() if has_figures(row)}


def missing(side: str) -> str:
    """Return why a side cannot run here, or an empty string."""
    needed = NEEDS.get(side)
    if needed is None or importlib.util.find_spec(needed) is not None:
        return ""
    return f"{needed} is not installed: pip install {needed}"


def quotient(value: float | None, other: float | None) -> float | None:
    """Return ``value / other``, or None if either is missing or ``other`` is not positive."""
    return value / other if value is not None and other is not None and other > 0 else None


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
