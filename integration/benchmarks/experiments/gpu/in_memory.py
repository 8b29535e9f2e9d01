"""Speed on one device without offload.

[Note: plain torch]
The reference is a usual torch loop with fused AdamW. In bf16 there are two such loops: autocast
over fp32 weights, and bf16 weights with hand-written fp32 master weights, which matches the
engine's arithmetic. The faster one is the reference.

"reserved" is torch's peak reserved over its peak allocated memory. The allocator keeps freed
memory, so a ratio of 1 means that all freed memory was reused.
"""

from __future__ import annotations

from benchmarks.experiments.gpu.part import IN_MEMORY, Context, Part
from benchmarks.harness.job import Job
from benchmarks.harness.memory import GIB
from benchmarks.harness.ranks import Row
from benchmarks.harness.report import MS, Column, Section
from benchmarks.harness.rounds import race_on_device

BASELINES = ("torch", "torch, masters by hand")
BARS = {0: 0.98, 1: 0.98, 2: 0.98, 3: 0.95}
"""Minimum tokens per second relative to plain torch, by stage."""


def single_jobs() -> list[Job]:
    """Return a job per contender and dtype. Contenders compared with each other are neighbours."""
    jobs = []
    for dtype in ("bf16", "fp32"):
        sides = [("torch", "torch", 0), *((f"stage {s}", "zero", s) for s in BARS)]
        sides += [("fsdp2", "fsdp2", 3), ("deepspeed stage 3", "deepspeed", 3)]
        if dtype == "bf16":
            sides.insert(1, ("torch, masters by hand", "torch_masters", 0))
        for name, side, stage in sides:
            job = Job(f"{dtype}: {name}", side, IN_MEMORY, 8, 20, 5, dtype=dtype, stage=stage)
            jobs.append(job.unchecked())
    return jobs


def _run_single(context: Context) -> Row:
    dry = ("bf16: torch", "bf16: stage 3")
    jobs = [
        context.traced(context.sized(job), 2)
        for job in single_jobs()
        if not context.is_dry_run or job.name in dry
    ]
    rows = race_on_device(jobs, 1 if context.is_dry_run else 3, context.runner)
    for name, row in rows.items():
        dtype, _, who = name.partition(": ")
        speeds = [rows.get(f"{dtype}: {plain}", {}).get("tokens_per_s") for plain in BASELINES]
        plain = max((speed for speed in speeds if speed is not None), default=None)
        bar = BARS[int(who.removeprefix("stage "))] if who.startswith("stage ") else None
        if "tokens_per_s" in row and plain is not None:
            ratio = row["tokens_per_s"] / plain
            is_met = None if bar is None or context.is_dry_run else ratio >= bar
            row |= {"to_torch": ratio, "bar": bar, "is_met": is_met}
    return {"rows": rows}


def _section_of_single(found: Row) -> Section:
    columns = (
        Column("tokens/s", "tokens_per_s", ",.0f"),
        Column("ms", "step_s", ".1f", MS),
        Column("to torch", "to_torch", ".3f"),
        Column("device GiB", "device_peak_bytes", ".2f", GIB),
        Column("reserved", "reserved_to_allocated", ".3f"),
        Column("last loss", lambda row: row["losses"][-1], ".4f"),
    )
    caption = "medians over rounds; bars: 0.98, stage 3 0.95"
    return Section("nothing offloaded", found["rows"], columns, caption)


SINGLE = Part(
    *("single", "nothing offloaded, beside plain torch, FSDP2 and DeepSpeed", 8.0),
    _run_single,
    _section_of_single,
)
