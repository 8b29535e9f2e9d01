"""Models that are too large for their device, or for their host, without offload.

Before a job starts, `zero_core.plan` predicts its memory; a job that needs more host memory than is
available is skipped with both numbers. The limit of the device is torch's, of its own allocator. A
measured peak of device memory is compared with the plan, activations included.
"""

from __future__ import annotations

from typing import Any

from benchmarks.experiments.gpu.part import Context, Part
from benchmarks.harness.job import Job
from benchmarks.harness.memory import GIB, available_bytes
from benchmarks.harness.models import GptShape
from benchmarks.harness.ranks import Row
from benchmarks.harness.report import Column, Section, bars
from benchmarks.harness.rounds import start_on_device
from zero_core.errors import ZeroError

# DeepSpeed's ZeRO-Offload tutorial: 50 layers, 4096 wide, batch 10, activation checkpointing.
TUTORIAL = GptShape(layers=50, width=4096, heads=32, vocab=50257, context=1024)
WIDE = GptShape(layers=40, width=5120, heads=40, vocab=50257, context=1024)
DEVICE_LIMIT_BYTES, HOST_LIMIT_BYTES = 32 * GIB, 128 * GIB
PINNED = {"device": "cpu", "pin_memory": True}
PLAN_BAR = 0.05
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


def capacity_jobs() -> list[Job]:
    """Return the tutorial's model in both 16-bit types and with 8-bit states, and a wider one.

    The bars are memory and that the loss falls, not speed.
    """

    def job(name: str, shape: GptShape = TUTORIAL, dtype: str = "bf16", **offload: Any) -> Job:
        made = Job(
            *(name, "zero", shape, 10, 2, 1),
            model="small_logits",
            is_deferred=True,
            dtype=dtype,
            stage=2,
            zero={"offload_optimizer": {**PINNED, **offload}},
            top={"activation_checkpointing": {}},
            is_repeating=True,
            device_limit_bytes=None if shape is WIDE else DEVICE_LIMIT_BYTES,
        )
        return made if dtype == "fp16" else made.unchecked()

    return [
        job("tutorial, bf16"),
        # For a host that cannot hold fp32 states of so many parameters.
        job("tutorial, bf16, int8 states", state_dtype="int8"),
        job("wide, bf16, int8 states", WIDE, state_dtype="int8"),
        job("tutorial, fp16", dtype="fp16"),
    ]


def _row(job: Job, context: Context) -> Row:
    try:
        memory = job.plan().memory  # what it holds as long as the engine lives
    except ZeroError as error:
        return {"failure": str(error)}
    row: Row = {
        "planned_host_bytes": memory.host_bytes,
        "planned_device_bytes": memory.device_bytes,
    }
    there = available_bytes()
    print(
        f"capacity: {job.name}: {job.shape.numel / 1e9:.2f} B parameters; planned without "
        f"activations: host {memory.host_bytes / GIB:.1f} GiB ({there / GIB:.1f} available), "
        f"device {memory.device_bytes / GIB:.1f} GiB",
        flush=True,
    )
    if reason := why_too_large(memory.host_bytes):
        return {**row, "skipped": reason}
    row |= start_on_device(job, context.runner)
    if "losses" in row:
        is_narrow = "state_dtype" in job.zero["offload_optimizer"]
        row["is_falling"] = row["losses"][-1] < row["losses"][0]
        is_within = not is_narrow or row["host_peak_bytes"] <= HOST_LIMIT_BYTES
        # Where the device cannot be limited, the CPU, nothing is shown about its limit.
        is_limited = job.device_limit_bytes is None or row["device_limit_bytes"] is not None
        row["is_met"] = row["is_falling"] and is_within if is_limited else None
    return row


def why_too_large(needed_bytes: int) -> str:
    """Return both numbers, if the host has not so much memory left."""
    there = available_bytes()
    if needed_bytes <= there:
        return ""
    return f"needs {needed_bytes / GIB:.1f} GiB of host memory, {there / GIB:.1f} are available"


def with_plan(row: Row, job: Job) -> Row:
    """Return the row with the planned peak, activations included, beside the measured one.

    Null where the device does not measure its peak (the CPU), with the reason.
    """
    if "step_s" not in row:
        return row
    try:
        planned = job.plan(has_activations=True).memory.device_bytes
    except ZeroError as error:
        return {**row, "planned_peak_bytes": None, "why_not_planned": str(error)}
    peak = row["device_peak_bytes"]
    beside: Row = {"planned_peak_bytes": planned, "plan_bar": PLAN_BAR}
    if peak is None:
        why = "this device does not tell its peak"
        return {**row, **beside, "peak_to_plan": None, "is_plan_met": None, "why_null": why}
    ratio = peak / planned
    return {**row, **beside, "peak_to_plan": ratio, "is_plan_met": abs(ratio - 1) <= PLAN_BAR}


def _section(found: Row) -> Section:
    rows = found["rows"]
    caption = "GiB; met: the loss fell, within the limits; bar of the peak: within 5% of the plan"
    keys = ("device_peak_bytes", "planned_peak_bytes", "host_peak_bytes")
    panels = bars("capacity", rows, {key: key for key in keys}, "GiB", GIB)
    return Section("large models", rows, COLUMNS, caption, panels=panels)


def _run(context: Context) -> Row:
    jobs = map(context.sized, capacity_jobs()[2:3] if context.is_dry_run else capacity_jobs())
    rows = {job.name: with_plan(_row(job, context), job) for job in jobs}
    return {"host_limit_bytes": HOST_LIMIT_BYTES, "rows": rows}


PART = Part(
    "largest",
    "10 B parameters within 32 GiB of device memory, 13 B within 128 GiB of the host's",
    8.0,
    _run,
    _section,
)
