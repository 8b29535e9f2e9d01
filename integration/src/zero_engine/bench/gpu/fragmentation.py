"""Steps of random lengths: what torch's allocator reserves over what is allocated at the most.

Both are peaks of the same steps. The allocator keeps what was freed, so a ratio of 1 says that
every hole was filled again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from matplotlib.axes import Axes
from rich.table import Table

from zero_engine.bench.gpt import GptShape
from zero_engine.bench.gpu.part import Context, Part, Row
from zero_engine.bench.gpu.tables import steps_of, table_of_steps
from zero_engine.bench.gpu.training.job import Job
from zero_engine.bench.gpu.training.start import train_in_turns
from zero_engine.bench.offload_cuda.settings import DRY, GIB

__all__ = ["PART", "fragmentation_jobs", "judged"]

SHAPE = GptShape(layers=24, width=1024, heads=16, vocab=50257, context=1024)
BAR = 1.05


def fragmentation_jobs(*, is_dry_run: bool) -> list[Job]:
    """Every contender; the engine's stage 3 and plain torch come first."""
    size: dict[str, Any] = {"shape": SHAPE, "micro_batch": 8, "steps": 500, "warmup": 0}
    if is_dry_run:
        size = {"shape": DRY.shape, "micro_batch": 2, "steps": 4, "warmup": 0}
    sides = (
        ("stage 3", "zero", 3),
        ("torch", "torch", 0),
        ("deepspeed stage 3", "deepspeed", 3),
        ("stage 2", "zero", 2),
        ("fsdp2", "fsdp2", 3),
        ("stage 1", "zero", 1),
        ("stage 0", "zero", 0),
    )
    return [
        Job(name, side, "bf16", stage, is_random_length=True, **size)
        for name, side, stage in (sides[:2] if is_dry_run else sides)
    ]


def judged(rows: Mapping[str, Row]) -> dict[str, Row]:
    """The rows of this engine with the bar; null where the device does not tell its memory."""
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
    rows = train_in_turns(fragmentation_jobs(is_dry_run=context.is_dry_run), 1, context)
    return {"rows": judged(rows)}


def _table(found: Mapping[str, Any]) -> Table:
    return table_of_steps(
        found,
        _cells,
        ("allocated", "reserved", "ratio", "tokens/s"),
        title="random lengths",
        caption=f"GiB, at the most; bar: {BAR}",
    )


def _cells(row: Row) -> Iterable[str]:
    for key in ("device_peak_bytes", "device_reserved_bytes"):
        yield "" if row[key] is None else f"{row[key] / GIB:.3f}"
    ratio = row["reserved_to_allocated"]
    yield "" if ratio is None else f"{ratio:.3f}"
    yield f"{row['tokens_per_s']:,.0f}"


def _draw(axes: Axes, found: Mapping[str, Any]) -> None:
    rows = steps_of(found)
    values = [row["reserved_to_allocated"] or 0.0 for row in rows.values()]
    axes.barh(list(rows), values)
    axes.axvline(BAR, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("reserved over allocated")


PART = Part(
    name="fragmentation",
    about="500 steps of random lengths: reserved over allocated memory",
    share=5.0,
    run=_run,
    table=_table,
    draw=_draw,
)
