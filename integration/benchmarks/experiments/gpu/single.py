"""One device, nothing offloaded: tokens per second of the engine over those of plain torch.

Plain torch is its users' usual loop, with a fused AdamW: in bf16 either autocast over fp32 weights,
or bf16 weights with fp32 master weights kept by hand, which are the engine's numbers. The faster of
the two is the reference. The row "all in bf16" has no master weights, so it trains other numbers;
it shows their cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rich.table import Table

from benchmarks.experiments.gpu.capacity import no_checks
from benchmarks.experiments.gpu.part import Context, Part
from benchmarks.experiments.gpu.sizes import DRY, REAL_IN_MEMORY
from benchmarks.harness.job import Job
from benchmarks.harness.memory import GIB
from benchmarks.harness.ranks import Row
from benchmarks.harness.report import MS, Axes, Column, bars, table_of
from benchmarks.harness.rounds import measured, race_on_device

ROUNDS = 3
DRY_CONTENDERS = ("torch", "stage 3")
BASELINES = ("torch", "torch, masters by hand")
BARS = {0: 0.98, 1: 0.98, 2: 0.98, 3: 0.95}
"""Of plain torch's tokens per second, by stage."""
COLUMNS = (
    Column("tokens/s", "tokens_per_s", ",.0f"),
    Column("ms", "step_s", ".1f", MS),
    Column("to torch", "to_torch", ".3f"),
    Column("device GiB", "device_peak_bytes", ".2f", GIB),
    Column("last loss", lambda row: row["losses"][-1], ".4f"),
)


def single_jobs(*, is_dry_run: bool) -> list[Job]:
    """Return every contender, in turns: those that are compared stand beside each other."""
    sizes: Row = {"micro_batch": 8, "steps": 20, "warmup": 5}
    if is_dry_run:
        sizes = {"micro_batch": 2, "steps": 2, "warmup": 1}
    shape = DRY.shape if is_dry_run else REAL_IN_MEMORY
    jobs = []
    for dtype in ("bf16",) if is_dry_run else ("bf16", "fp32"):
        sides = [("torch", "torch", 0), *((f"stage {s}", "zero", s) for s in BARS)]
        sides += [("fsdp2", "fsdp2", 3), ("deepspeed stage 3", "deepspeed", 3)]
        if dtype == "bf16":
            sides.insert(1, ("torch, masters by hand", "torch_masters", 0))
            sides.append(("torch, all in bf16", "torch_low", 0))
        if is_dry_run:
            sides = [side for side in sides if side[0] in DRY_CONTENDERS]
        for name, side, stage in sides:
            job = Job(f"{dtype}: {name}", side, shape, **sizes, dtype=dtype, stage=stage)
            jobs.append(replace(no_checks(job), num_traced=2))
    return jobs


def judged(rows: Mapping[str, Row], *, is_judged: bool) -> dict[str, Row]:
    """Return the rows with ``to_torch``: tokens per second over plain torch's in the same dtype.

    Args:
        rows: by contender.
        is_judged: whether bars apply: not on the CPU.
    """
    found = {}
    for name, row in rows.items():
        dtype, _, who = name.partition(": ")
        speeds = [rows.get(f"{dtype}: {plain}", {}).get("tokens_per_s") for plain in BASELINES]
        plain = max((speed for speed in speeds if speed is not None), default=None)
        stage = int(who.removeprefix("stage ")) if who.startswith("stage ") else None
        if "tokens_per_s" in row and plain is not None:
            ratio, bar = row["tokens_per_s"] / plain, None if stage is None else BARS[stage]
            is_met = None if bar is None or not is_judged else ratio >= bar
            row = {**row, "to_torch": ratio, "bar": bar, "is_met": is_met}
        found[name] = row
    return found


def _run(context: Context) -> Row:
    jobs = [
        replace(job, trace_file=str(context.traces / f"{job.name}.json.gz"))
        for job in single_jobs(is_dry_run=context.is_dry_run)
    ]
    rounds = 1 if context.is_dry_run else ROUNDS
    rows = race_on_device(jobs, rounds, context.runner, context.console.print)
    return {"rows": judged(rows, is_judged=not context.is_dry_run)}


def _table(found: Mapping[str, Any]) -> Table:
    caption = "medians over rounds; bars: 0.98, stage 3 0.95"
    return table_of(found["rows"], COLUMNS, title="nothing offloaded", caption=caption)


def _draw(axes: Axes, found: Mapping[str, Any]) -> None:
    speeds = {name: row["tokens_per_s"] for name, row in measured(found["rows"]).items()}
    bars(axes, speeds, "tokens per second", ours=lambda name: ": stage" in name)


PART = Part(
    name="single",
    about="nothing offloaded, beside plain torch, FSDP2 and DeepSpeed",
    share=8.0,
    run=_run,
    table=_table,
    draw=_draw,
)
