"""Tokens per second of every ratio and of the other sides, in rounds of fresh processes."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from zero_engine.bench.offload_cuda.jobs import Job, Runner
from zero_engine.bench.offload_cuda.settings import Settings
from zero_engine.bench.offload_cuda.sides import NEEDS

__all__ = ["speed", "speed_jobs"]

RATIOS: tuple[float | str, ...] = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0, "auto")
TWIN_FLOW = (0.8, 0.6, 0.4, 0.2)
"""Ratios of DeepSpeed, which has them at stage 3 alone; it counts sub-groups, not elements."""
Row = dict[str, Any]


def speed_jobs(settings: Settings) -> list[Job]:
    """Every contender."""

    def job(name: str, side: str, *, stage: int = settings.stage, **offload: Any) -> Job:
        return Job(
            name=name,
            side=side,
            shape=settings.shape,
            micro_batch=settings.micro_batch,
            steps=settings.steps,
            warmup=settings.warmup,
            settling=settings.settling if offload.get("ratio") == "auto" else 0,
            stage=stage,
            offload=offload,
        )

    return [
        *(job(f"ratio {ratio}", "zero", ratio=ratio) for ratio in RATIOS),
        job("fsdp2", "fsdp2"),
        job("deepspeed-2", "deepspeed", stage=2),
        job("deepspeed-3", "deepspeed", stage=3),
        *(
            job(f"deepspeed-3 ratio {ratio}", "deepspeed", stage=3, ratio=ratio)
            for ratio in TWIN_FLOW
        ),
    ]


def speed(jobs: Sequence[Job], settings: Settings, runner: Runner, console: Console) -> Row:
    """A row per contender: medians over the rounds, or why there are none."""
    found: dict[str, list[Row]] = {job.name: [] for job in jobs}
    for number in range(settings.rounds):
        for job in jobs:
            rows = found[job.name]
            if rows and "step_s" not in rows[-1]:
                continue
            console.print(f"speed: round {number + 1}/{settings.rounds}: {job.name}")
            missing = _missing(job)
            rows.append({"failure": missing} if missing else runner.run(job))
    rows_by_name = {name: _median(rows) for name, rows in found.items()}
    return {"rows": rows_by_name, "loss_spread": _loss_spread(rows_by_name)}


def _missing(job: Job) -> str:
    needed = NEEDS.get(job.side)
    if needed is None or importlib.util.find_spec(needed) is not None:
        return ""
    return f"{needed} is not installed: pip install {needed}"


def _median(rows: Sequence[Row]) -> Row:
    """The rounds of one contender as one row; its losses are those of the first."""
    measured = [row for row in rows if "step_s" in row]
    if not measured:
        return rows[-1]
    steps_s = [row["step_s"] for row in measured]
    return {
        **measured[0],
        "steps_s": steps_s,
        "step_s": statistics.median(steps_s),
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in measured),
    }


def _loss_spread(rows: Mapping[str, Row]) -> float | None:
    """The largest relative difference between losses of this engine's ratios at the same step.

    On the CPU it is 0: there host and device update with the same kernel.
    """
    sides: list[list[float]] = [
        row["losses"] for name, row in rows.items() if name.startswith("ratio ") if _ran(row)
    ]
    spreads = [(max(step) - min(step)) / min(step) for step in zip(*sides, strict=False)]
    return max(spreads, default=None)


def _ran(row: Row) -> bool:
    return "step_s" in row
