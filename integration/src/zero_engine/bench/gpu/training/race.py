"""Contenders in turns, round by round, each time in a fresh process."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence

from zero_engine.bench.gpu.part import Context, Row
from zero_engine.bench.gpu.training.job import Job
from zero_engine.bench.gpu.training.sides import NEEDS

__all__ = ["race"]


def race(jobs: Sequence[Job], rounds: int, context: Context) -> dict[str, Row]:
    """A row per contender: medians over its rounds, or why it has none."""
    found: dict[str, list[Row]] = {job.name: [] for job in jobs}
    for number in range(rounds):
        for job in jobs:
            rows = found[job.name]
            if rows and "step_s" not in rows[-1]:
                continue  # it failed, or the time was over: it would again
            context.console.print(f"round {number + 1}/{rounds}: {job.name}")
            rows.append(_run(job, context))
    return {name: _median(rows) for name, rows in found.items()}


def _run(job: Job, context: Context) -> Row:
    needed = NEEDS.get(job.side)
    if needed is not None and importlib.util.find_spec(needed) is None:
        return {"failure": f"{needed} is not installed: pip install {needed}"}
    return context.runner.start("zero_engine.bench.gpu.training.rank", job.to_json())


def _median(rows: Sequence[Row]) -> Row:
    """All else is that of the first round."""
    measured = [row for row in rows if "step_s" in row]
    if not measured:
        return rows[-1]
    times = [row["step_s"] for row in measured]
    speeds = [row["tokens_per_s"] for row in measured]
    medians = {"step_s": statistics.median(times), "tokens_per_s": statistics.median(speeds)}
    return {**measured[0], **medians, "steps_s": times}
