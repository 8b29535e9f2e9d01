"""What a step takes over the slowest of what it cannot do without.

[Note: bounds of a step]
device  seconds in which a kernel ran: from torch.profiler, in steps after the timed ones
bus     bytes that the tier counted over the measured bandwidth of pinned copies; both ways run at
        once on a full-duplex bus, so the slower of the two counts
host    28 bytes per element that the host updates (gradient 2; master and two moments, in and out,
        24; parameter 2) over the measured bandwidth of a triad
bound   the largest of the three; a step that overlaps perfectly takes no longer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from zero_engine.bench.offload_cuda.jobs import Job, Runner
from zero_engine.bench.offload_cuda.settings import Settings

__all__ = ["BOUND_GOAL", "RATIOS", "bounds", "timeline"]

BOUND_GOAL = 1.15
HOST_BYTES = 28
RATIOS: tuple[float | str, ...] = (1.0, 0.6, "auto")
Row = dict[str, Any]


def timeline(
    settings: Settings,
    runner: Runner,
    console: Console,
    ratios: Sequence[float | str] = RATIOS,
    *,
    traces: Path | None = None,
) -> Row:
    """A row per ratio, and the bandwidths that they are held against.

    Args:
        settings: sizes.
        runner: starts the processes.
        console: for a line per row.
        ratios: of the optimizer's state, on the host.
        traces: folder in which their traces are kept.
    """
    console.print("timeline: bandwidth")
    bandwidth = runner.start("zero_engine.bench.offload_cuda.bandwidth", str(settings.triad_numel))
    rows = {}
    for ratio in ratios:
        job = Job(
            name=f"ratio {ratio}",
            side="zero",
            shape=settings.shape,
            micro_batch=settings.micro_batch,
            steps=settings.steps,
            warmup=settings.warmup,
            settling=settings.settling if ratio == "auto" else 0,
            stage=settings.stage,
            offload={"ratio": ratio},
            num_traced=settings.num_traced,
            trace_file=None if traces is None else str(traces / f"ratio {ratio}.json.gz"),
        )
        console.print(f"timeline: {job.name}")
        row = runner.run(job)
        rows[job.name] = {**row, **bounds(row, bandwidth)} if "step_s" in row else row
    return {"bandwidth_bytes_per_s": bandwidth, "goal": BOUND_GOAL, "rows": rows}


def bounds(row: Mapping[str, Any], bandwidth: Mapping[str, Any]) -> Row:
    """See [Note: bounds of a step]; null where nothing tells, and then there is no bound.

    Args:
        row: what a job found.
        bandwidth: bytes/s: ``host``, and ``pinned`` with ``d2h`` and ``h2d``, or null.
    """
    moved, busy_s, pinned = row["moved_bytes"], row["device_busy_s"], bandwidth.get("pinned")
    numel = row["host_share"] * row["num_parameters"]
    found: Row = {
        "device_idle_s": None if busy_s is None else max(0.0, row["step_s"] - busy_s),
        "bus_s": None,
        "host_s": numel * HOST_BYTES / bandwidth["host"] if "host" in bandwidth else None,
        "bound": None,
        "step_to_bound": None,
        "is_met": None,
    }
    if pinned is not None:
        ways = ("d2h", "h2d")
        found["bus_s"] = max(moved[f"bytes_{way}"] / pinned[way] for way in ways)
    parts = {"device": busy_s, "bus": found["bus_s"], "host": found["host_s"]}
    if None not in parts.values():
        found["bound"] = max(parts, key=lambda name: parts[name])
        found["step_to_bound"] = row["step_s"] / parts[found["bound"]]
        found["is_met"] = found["step_to_bound"] <= BOUND_GOAL
    else:
        blind = [name for name, seconds in parts.items() if seconds is None]
        found["why_null"] = f"not measured on this device: {', '.join(blind)}"
    return found
