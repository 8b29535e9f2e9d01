"""Models that are too large for their device, or for their host, without offload.

Before a job starts, `zero_core.plan` tells what it takes; a job whose host memory is not there is
skipped with both numbers. The limit of the device is torch's, of its own allocator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

import zero_core
from zero_engine.bench.gpt import Gpt
from zero_engine.bench.offload_cuda.host_memory import available_bytes
from zero_engine.bench.offload_cuda.jobs import Job, Runner
from zero_engine.bench.offload_cuda.settings import GIB, Settings

__all__ = ["capacity", "capacity_jobs", "planned_bytes"]

Row = dict[str, Any]


def capacity_jobs(settings: Settings) -> list[Job]:
    """The tutorial's model in both 16-bit types, and with 8-bit states; a wider one with those."""

    def job(name: str, **what: Any) -> Job:
        return Job(
            name=name,
            side="zero",
            micro_batch=settings.large_batch,
            steps=settings.large_steps,
            warmup=1,
            stage=settings.stage,
            is_large=True,
            is_repeating=True,
            **what,
        )

    limit = settings.device_limit_bytes
    return [
        job("tutorial, bf16", shape=settings.tutorial, dtype="bf16", device_limit_bytes=limit),
        job(  # for a host that cannot hold fp32 states of so many parameters
            "tutorial, bf16, int8 states",
            shape=settings.tutorial,
            device_limit_bytes=limit,
            offload={"state_dtype": "int8"},
        ),
        job("wide, bf16, int8 states", shape=settings.wide, offload={"state_dtype": "int8"}),
        job("tutorial, fp16", shape=settings.tutorial, dtype="fp16", device_limit_bytes=limit),
    ]


def capacity(jobs: Sequence[Job], settings: Settings, runner: Runner, console: Console) -> Row:
    """A row per job."""
    rows = {}
    for job in jobs:
        is_narrow = "state_dtype" in job.offload
        limit = settings.host_limit_bytes if is_narrow else None
        rows[job.name] = _row(job, limit, runner, console)
    return {"host_limit_bytes": settings.host_limit_bytes, "rows": rows}


def _row(job: Job, host_limit: int | None, runner: Runner, console: Console) -> Row:
    try:
        planned = planned_bytes(job)
    except zero_core.ZeroError as error:
        return {"failure": str(error)}
    needed, there = planned["planned_host_bytes"], available_bytes()
    console.print(
        f"capacity: {job.name}: {job.shape.numel / 1e9:.2f} B parameters; planned without "
        f"activations: host {needed / GIB:.1f} GiB ({there / GIB:.1f} available), device "
        f"{planned['planned_device_bytes'] / GIB:.1f} GiB"
    )
    if needed > there:
        reason = f"needs {needed / GIB:.1f} GiB of host memory, {there / GIB:.1f} are available"
        return {**planned, "skipped": reason}
    row = {**planned, **runner.run(job)}
    if "losses" in row:
        row["is_falling"] = row["losses"][-1] < row["losses"][0]
        is_within = host_limit is None or row["host_peak_bytes"] <= host_limit
        # Where the device cannot be limited, the CPU, nothing is shown about its limit.
        is_limited = job.device_limit_bytes is None or row["device_limit_bytes"] is not None
        row["is_met"] = row["is_falling"] and is_within if is_limited else None
    return row


def planned_bytes(job: Job) -> dict[str, int]:
    """Of this engine's job: bytes of what lives as long as the engine."""
    with torch.device("meta"):
        model = Gpt(job.shape)
    memory = zero_core.plan(model, job.config(), 1).memory
    return {
        "planned_host_bytes": memory.host_bytes,
        "planned_device_bytes": memory.device_bytes,
    }
