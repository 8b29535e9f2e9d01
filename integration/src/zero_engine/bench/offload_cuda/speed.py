"""Tokens per second of every ratio and of the other sides, in rounds of fresh processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from zero_engine.bench.offload_cuda.jobs import Job, Runner
from zero_engine.bench.offload_cuda.settings import Settings
from zero_engine.bench.turns import take_turns

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
        job("fsdp2", "fsdp2", stage=3),
        job("fsdp2, units kept", "fsdp2", stage=2),
        job("deepspeed-2", "deepspeed", stage=2),
        job("deepspeed-3", "deepspeed", stage=3),
        *(
            job(f"deepspeed-3 ratio {ratio}", "deepspeed", stage=3, ratio=ratio)
            for ratio in TWIN_FLOW
        ),
    ]


def speed(jobs: Sequence[Job], settings: Settings, runner: Runner, console: Console) -> Row:
    """A row per contender: medians over the rounds, or why there are none."""

    def say(line: str) -> None:
        console.print(f"speed: {line}")

    rows = take_turns(jobs, settings.rounds, runner.run, say)
    return {"rows": rows, "loss_spread": _loss_spread(rows)}


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
