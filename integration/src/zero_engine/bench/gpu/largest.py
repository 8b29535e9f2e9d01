"""Models that only offload makes possible, and their peak of device memory against the plan.

The models and limits are those of `zero_engine.bench.offload_cuda.capacity`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from matplotlib.axes import Axes
from rich.table import Table

import zero_core
from zero_core.errors import ZeroError
from zero_engine.bench.gpt import GptWithSmallLogits
from zero_engine.bench.gpu.part import Context, Part, Row
from zero_engine.bench.gpu.tables import steps_of, table_of_steps
from zero_engine.bench.offload_cuda.capacity import capacity, capacity_jobs
from zero_engine.bench.offload_cuda.jobs import Job
from zero_engine.bench.offload_cuda.settings import DRY, GIB, REAL

__all__ = ["PART", "with_plan"]

PLAN_BAR = 0.05
DRY_JOBS = ("tutorial, bf16", "wide, bf16, int8 states")


def _run(context: Context) -> Row:
    # Two timed steps: the bars are memory and that the loss falls, not speed.
    settings = DRY if context.is_dry_run else replace(REAL, large_steps=2)
    jobs = {job.name: job for job in capacity_jobs(settings)}
    chosen = [jobs[name] for name in (DRY_JOBS if context.is_dry_run else jobs)]
    found = capacity(chosen, settings, context.runner, context.console)
    rows = {name: with_plan(row, jobs[name]) for name, row in found["rows"].items()}
    return {**found, "rows": rows}


def with_plan(row: Row, job: Job) -> Row:
    """The row with the planned peak, activations included, beside the measured one.

    Null where the device does not tell its peak (the CPU), with the reason.
    """
    if "step_s" not in row:
        return row
    try:
        planned = _planned_peak_bytes(job)
    except ZeroError as error:
        return {**row, "planned_peak_bytes": None, "why_not_planned": str(error)}
    peak = row["device_peak_bytes"]
    beside: Row = {"planned_peak_bytes": planned, "plan_bar": PLAN_BAR}
    if peak is None:
        why = "this device does not tell its peak"
        return {**row, **beside, "peak_to_plan": None, "is_plan_met": None, "why_null": why}
    ratio = peak / planned
    return {**row, **beside, "peak_to_plan": ratio, "is_plan_met": abs(ratio - 1) <= PLAN_BAR}


def _planned_peak_bytes(job: Job) -> int:
    with torch.device("meta"):
        model = GptWithSmallLogits(job.shape)
        ids = torch.zeros(job.micro_batch, job.shape.context, dtype=torch.int64)
    return zero_core.plan(model, job.config(), 1, example_inputs=[ids]).memory.device_bytes


def _table(found: Mapping[str, Any]) -> Table:
    return table_of_steps(
        found,
        _cells,
        ("10^9", "s/step", "device", "plan", "to plan", "limit", "host", "loss"),
        title="large models",
        caption="GiB; bar of the peak: within 5% of the plan",
    )


def _cells(row: Row) -> Iterable[str]:
    ratio = row.get("peak_to_plan")
    yield f"{row['num_parameters'] / 1e9:.2f}"
    yield f"{row['step_s']:.2f}"
    for key in ("device_peak_bytes", "planned_peak_bytes"):
        yield "" if row[key] is None else f"{row[key] / GIB:.2f}"
    yield "" if ratio is None else f"{ratio:.3f}"
    for key in ("device_limit_bytes", "host_peak_bytes"):
        yield "" if row[key] is None else f"{row[key] / GIB:.2f}"
    yield f"{row['losses'][0]:.3f} to {row['losses'][-1]:.3f}"


def _draw(axes: Axes, found: Mapping[str, Any]) -> None:
    rows = steps_of(found)
    height = 0.4
    for number, key in enumerate(("device_peak_bytes", "planned_peak_bytes")):
        places = [place + number * height for place in range(len(rows))]
        sizes = [(row[key] or 0) / GIB for row in rows.values()]
        axes.barh(places, sizes, height=height, label=key.removesuffix("_bytes").replace("_", " "))
    axes.set_yticks([place + height / 2 for place in range(len(rows))], list(rows))
    axes.invert_yaxis()
    axes.set_xlabel("GiB")
    axes.legend()


PART = Part(
    name="largest",
    about="10 B parameters within 32 GiB of device memory, 13 B within 128 GiB of the host's",
    share=8.0,
    run=_run,
    table=_table,
    draw=_draw,
)
