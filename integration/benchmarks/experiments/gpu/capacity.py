"""Models that are too large for their device, or for their host, without offload.

Before a job starts, `zero_core.plan` predicts its memory; a job that needs more host memory than is
available is skipped with both numbers. The limit of the device is torch's, of its own allocator. A
measured peak of device memory is compared with the plan, activations included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.table import Table

import zero_core
from benchmarks.experiments.gpu.part import Context, Part
from benchmarks.experiments.gpu.sizes import DRY, REAL, Sizes
from benchmarks.harness.job import Job
from benchmarks.harness.memory import GIB, available_bytes
from benchmarks.harness.ranks import Row
from benchmarks.harness.report import Axes, Column, grouped_bars, table_of
from benchmarks.harness.rounds import measured, start_on_device
from zero_core.errors import ZeroError

PINNED = {"device": "cpu", "pin_memory": True}
PLAN_BAR = 0.05
DRY_JOBS = ("wide, bf16, int8 states",)
COLUMNS = (
    Column("10^9", "num_parameters", ".2f", 1e9),
    Column("s/step", "step_s", ".2f"),
    Column("device", "device_peak_bytes", ".2f", GIB),
    Column("plan", "planned_peak_bytes", ".2f", GIB),
    Column("to plan", "peak_to_plan", ".3f"),
    Column("limit", "device_limit_bytes", ".2f", GIB),
    Column("host", "host_peak_bytes", ".2f", GIB),
    Column("loss", lambda row: f"{row['losses'][0]:.3f} to {row['losses'][-1]:.3f}"),
    Column("skipped", "skipped_steps"),
    Column("", "is_met"),
)


def no_checks(job: Job) -> Job:
    """Return the job without checks of gradients, as the others: nothing skips a step."""
    return replace(job, top={**job.top, "check_grad_overflow": False})


def capacity_jobs(sizes: Sizes) -> list[Job]:
    """Return the tutorial's model in both 16-bit types and with 8-bit states, and a wider one."""

    def job(name: str, *, dtype: str = "bf16", is_wide: bool = False, **offload: Any) -> Job:
        shape = sizes.wide if is_wide else sizes.tutorial
        made = Job(
            *(name, "zero", shape, sizes.large_batch, sizes.large_steps),
            warmup=1,
            model="small_logits",
            is_deferred=True,
            dtype=dtype,
            stage=sizes.stage,
            zero={"offload_optimizer": {**PINNED, **offload}},
            top={"activation_checkpointing": {}},
            is_repeating=True,
            device_limit_bytes=None if is_wide else sizes.device_limit_bytes,
        )
        return made if dtype == "fp16" else no_checks(made)

    return [
        job("tutorial, bf16"),
        # For a host that cannot hold fp32 states of so many parameters.
        job("tutorial, bf16, int8 states", state_dtype="int8"),
        job("wide, bf16, int8 states", is_wide=True, state_dtype="int8"),
        job("tutorial, fp16", dtype="fp16"),
    ]


def capacity(jobs: Sequence[Job], sizes: Sizes, context: Context) -> Row:
    """Return a row per job."""
    rows = {job.name: with_plan(_row(job, sizes, context), job) for job in jobs}
    return {"host_limit_bytes": sizes.host_limit_bytes, "rows": rows}


def _row(job: Job, sizes: Sizes, context: Context) -> Row:
    try:
        planned = planned_bytes(job)
    except ZeroError as error:
        return {"failure": str(error)}
    needed, there = planned["planned_host_bytes"], available_bytes()
    context.console.print(
        f"capacity: {job.name}: {job.shape.numel / 1e9:.2f} B parameters; planned without "
        f"activations: host {needed / GIB:.1f} GiB ({there / GIB:.1f} available), device "
        f"{planned['planned_device_bytes'] / GIB:.1f} GiB"
    )
    if needed > there:
        reason = f"needs {needed / GIB:.1f} GiB of host memory, {there / GIB:.1f} are available"
        return {**planned, "skipped": reason}
    row = {**planned, **start_on_device(job, context.runner)}
    if "losses" in row:
        is_narrow = "state_dtype" in job.zero["offload_optimizer"]
        row["is_falling"] = row["losses"][-1] < row["losses"][0]
        is_within = not is_narrow or row["host_peak_bytes"] <= sizes.host_limit_bytes
        # Where the device cannot be limited, the CPU, nothing is shown about its limit.
        is_limited = job.device_limit_bytes is None or row["device_limit_bytes"] is not None
        row["is_met"] = row["is_falling"] and is_within if is_limited else None
    return row


def planned_bytes(job: Job) -> dict[str, int]:
    """Return the bytes that this engine's job holds as long as the engine lives."""
    memory = _plan(job)
    return {
        "planned_host_bytes": memory.host_bytes,
        "planned_device_bytes": memory.device_bytes,
    }


def with_plan(row: Row, job: Job) -> Row:
    """Return the row with the planned peak, activations included, beside the measured one.

    Null where the device does not measure its peak (the CPU), with the reason.
    """
    if "step_s" not in row:
        return row
    ids = torch.zeros(job.micro_batch, job.shape.context, dtype=torch.int64, device="meta")
    try:
        planned = _plan(job, example_inputs=[ids]).device_bytes
    except ZeroError as error:
        return {**row, "planned_peak_bytes": None, "why_not_planned": str(error)}
    peak = row["device_peak_bytes"]
    beside: Row = {"planned_peak_bytes": planned, "plan_bar": PLAN_BAR}
    if peak is None:
        why = "this device does not tell its peak"
        return {**row, **beside, "peak_to_plan": None, "is_plan_met": None, "why_null": why}
    ratio = peak / planned
    return {**row, **beside, "peak_to_plan": ratio, "is_plan_met": abs(ratio - 1) <= PLAN_BAR}


def _plan(job: Job, **further: Any) -> Any:
    return zero_core.plan(job.meta_model(), job.config(), 1, **further).memory


def table(found: Mapping[str, Any]) -> Table:
    """Return the table of a result of `capacity`."""
    caption = "GiB; met: the loss fell, within the limits; bar of the peak: within 5% of the plan"
    return table_of(found["rows"], COLUMNS, title="large models", caption=caption)


def draw(axes: Axes, found: Mapping[str, Any]) -> None:
    """Draw peaks beside the plan."""
    keys = ("device_peak_bytes", "planned_peak_bytes", "host_peak_bytes")
    grouped_bars(axes, measured(found["rows"]), keys, "GiB", GIB)


def _run(context: Context) -> Row:
    # Two timed steps: the bars are memory and that the loss falls, not speed.
    sizes = DRY if context.is_dry_run else replace(REAL, large_steps=2)
    jobs = capacity_jobs(sizes)
    chosen = [job for job in jobs if not context.is_dry_run or job.name in DRY_JOBS]
    return capacity(chosen, sizes, context)


PART = Part(
    name="largest",
    about="10 B parameters within 32 GiB of device memory, 13 B within 128 GiB of the host's",
    share=8.0,
    run=_run,
    table=table,
    draw=draw,
)
