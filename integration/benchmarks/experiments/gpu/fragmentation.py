"""Steps of random lengths: torch's reserved memory over its allocated memory.

Both are peaks of the same steps. The allocator keeps freed memory, so at a ratio of 1 every hole
was filled again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from benchmarks.experiments.gpu.capacity import no_checks
from benchmarks.experiments.gpu.part import Context, Part
from benchmarks.experiments.gpu.sizes import DRY, REAL_IN_MEMORY
from benchmarks.harness.job import Job
from benchmarks.harness.memory import GIB
from benchmarks.harness.ranks import Row
from benchmarks.harness.report import Axes, Column, bars, table_of
from benchmarks.harness.rounds import measured, race_on_device

BAR = 1.05
LENGTHS = 8
"""The shortest sample is such a part of the longest."""
SIDES = (
    ("stage 3", "zero", 3),
    ("torch", "torch", 0),
    ("deepspeed stage 3", "deepspeed", 3),
    ("stage 2", "zero", 2),
    ("fsdp2", "fsdp2", 3),
    ("stage 1", "zero", 1),
    ("stage 0", "zero", 0),
)
COLUMNS = (
    Column("allocated", "device_peak_bytes", ".3f", GIB),
    Column("reserved", "device_reserved_bytes", ".3f", GIB),
    Column("ratio", "reserved_to_allocated", ".3f"),
    Column("tokens/s", "tokens_per_s", ",.0f"),
)


def fragmentation_jobs(*, is_dry_run: bool) -> list[Job]:
    """Return every contender, the engine's stage 3 and plain torch first."""
    shape = DRY.shape if is_dry_run else REAL_IN_MEMORY
    size: Row = {"micro_batch": 8, "steps": 500}
    if is_dry_run:
        size = {"micro_batch": 2, "steps": 4}
    shortest = max(2, shape.context // LENGTHS)
    return [
        no_checks(
            Job(*(n, side, shape), **size, warmup=0, dtype="bf16", stage=s, shortest=shortest)
        )
        for n, side, s in (SIDES[:1] if is_dry_run else SIDES)
    ]


def judged(rows: Mapping[str, Row]) -> dict[str, Row]:
    """Return the rows with this engine's bar, null where memory is not measured."""
    found = {}
    for name, row in rows.items():
        if "step_s" in row:
            ratio = row["reserved_to_allocated"]
            is_judged = name.startswith("stage ") and ratio is not None
            row = {**row, "bar": BAR, "is_met": ratio <= BAR if is_judged else None}
            if ratio is None:
                row["why_null"] = "this device does not tell what its allocator reserves"
        found[name] = row
    return found


def _run(context: Context) -> Row:
    jobs = fragmentation_jobs(is_dry_run=context.is_dry_run)
    return {"rows": judged(race_on_device(jobs, 1, context.runner, context.console.print))}


def _table(found: Mapping[str, Any]) -> Table:
    caption = f"GiB, at the most; bar: {BAR}"
    return table_of(found["rows"], COLUMNS, title="random lengths", caption=caption)


def _draw(axes: Axes, found: Mapping[str, Any]) -> None:
    rows = measured(found["rows"])
    values = {name: row["reserved_to_allocated"] or 0.0 for name, row in rows.items()}
    bars(axes, values, "reserved over allocated", bar=BAR)


PART = Part(
    name="fragmentation",
    about="500 steps of random lengths: reserved over allocated memory",
    share=5.0,
    run=_run,
    table=_table,
    draw=_draw,
)
