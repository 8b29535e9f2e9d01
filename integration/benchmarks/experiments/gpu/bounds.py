"""An offloaded step over the slowest of its bounds: device, bus and host.

[Note: bounds of a step]
device  seconds in which a kernel ran: from torch.profiler, in steps after the timed ones
bus     bytes that the tier counted over the measured bandwidth of pinned copies; both ways run at
        once on a full-duplex bus, so the slower of the two counts
host    28 bytes per element that the host updates (gradient 2; master and two moments, in and out,
        24; parameter 2) over the measured bandwidth of a triad
bound   the largest of the three; a step that overlaps perfectly takes no longer
idle    time of a step in which no kernel ran
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from benchmarks.experiments.gpu.part import Context, Part
from benchmarks.experiments.gpu.speed import SPEED, speed_jobs
from benchmarks.harness.models import find_device
from benchmarks.harness.ranks import Place, Row
from benchmarks.harness.report import MS, Column, Section, bars
from benchmarks.harness.rounds import start_on_device
from benchmarks.harness.tracing import synchronize

BOUND_GOAL, IDLE_BAR = 1.15, 0.1
HOST_BYTES = 28
REPEATS = 8
NUM_TRACED = 3
TRIAD_NUMEL, DRY_TRIAD_NUMEL = 256 * 2**20, 2**20
"""Elements of each array of the host's triad, and of what is copied over the bus."""
TRIAD_BYTES = 12
"""An element of the triad: one fp32 read and written, one read."""
RATIOS: tuple[float | str, ...] = (1.0, 0.6, "auto")
DRY_RATIOS = (0.6,)


def _run(context: Context) -> Row:
    """Return a row per ratio of the optimizer's state on the host, and the bandwidths."""
    print("bandwidth", flush=True)
    numel = DRY_TRIAD_NUMEL if context.is_dry_run else TRIAD_NUMEL
    first = context.sized(replace(SPEED, micro_batch=8))
    (bandwidth,) = context.runner.start(f"{__name__}:bandwidth", {"numel": numel})
    rows = {}
    jobs = {job.name: job for job in speed_jobs(first)}
    for ratio in DRY_RATIOS if context.is_dry_run else RATIOS:
        job = jobs[f"ratio {ratio}"]
        print(job.name, flush=True)
        row = start_on_device(context.traced(job, NUM_TRACED), context.runner)
        rows[job.name] = with_idle({**row, **bounds(row, bandwidth)}) if "step_s" in row else row
    return {"bandwidth_bytes_per_s": bandwidth, "goal": BOUND_GOAL, "rows": rows}


def bounds(row: Mapping[str, Any], bandwidth: Mapping[str, Any]) -> Row:
    """Return [Note: bounds of a step], or null where a figure is not measured.

    Args:
        row: the result of a job.
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
    blind = [name for name, seconds in parts.items() if seconds is None]
    if blind:
        found["why_null"] = f"not measured on this device: {', '.join(blind)}"
        return found
    found["bound"] = max(parts, key=lambda name: float(parts[name]))
    found["step_to_bound"] = row["step_s"] / parts[found["bound"]]
    found["is_met"] = found["step_to_bound"] <= BOUND_GOAL
    return found


def with_idle(row: Row) -> Row:
    """Return the row with ``idle_share`` of a step, and whether that is below 0.1.

    The device is idle of necessity where the host or the bus is the slowest: the bar is for rows
    that the device bounds, and for the ratio that was chosen automatically.
    """
    idle_s = row.get("device_idle_s")
    if idle_s is None:
        return row
    share = idle_s / row["step_s"]
    is_for_it = row["bound"] == "device" or row["ratio_report"] is not None
    is_met = share < IDLE_BAR if is_for_it else None
    return {**row, "idle_share": share, "idle_bar": IDLE_BAR, "is_idle_met": is_met}


def bandwidth(place: Place, numel: int) -> Row:
    """Measure the host's memory and the bus. A target of `benchmarks.harness.ranks`."""
    device = find_device()
    copies = None if device.type == "cpu" else _pinned_copy_bytes_per_s(4 * numel, device)
    # A triad ``a += s * b`` of all threads. In place, as in an optimizer's step: every written line
    # was read, and none is fetched uncounted.
    a, b = torch.ones(numel), torch.ones(numel)
    triad_s = _best_s(lambda: a.add_(b, alpha=1e-6))
    return {"host": numel * TRIAD_BYTES / triad_s, "pinned": copies}


def _pinned_copy_bytes_per_s(num_bytes: int, device: torch.device) -> dict[str, float]:
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def timed(target: torch.Tensor, source: torch.Tensor) -> float:
        def copy() -> None:
            target.copy_(source, non_blocking=True)
            synchronize(device)

        return num_bytes / _best_s(copy)

    return {"d2h": timed(host, there), "h2d": timed(there, host)}


def _best_s(run: Callable[[], object]) -> float:
    """Return the seconds of the fastest call, after one that is not timed."""
    run()
    times = []
    for _ in range(REPEATS):
        started_at = time.perf_counter()
        run()
        times.append(time.perf_counter() - started_at)
    return min(times)


def _section(found: Row) -> Section:
    def to_bound(row: Row) -> str | None:
        ratio = row["step_to_bound"]
        return None if ratio is None else f"{ratio:.2f} of {row['bound']}"

    columns = (
        Column("step", "step_s", ".1f", MS),
        Column("device", "device_busy_s", ".1f", MS),
        Column("idle", "device_idle_s", ".1f", MS),
        Column("bus", "bus_s", ".1f", MS),
        Column("host", "host_s", ".1f", MS),
        Column("step to slowest", to_bound),
        Column("", "is_met"),
        Column("idle", "idle_share", ".1%"),
    )
    values = {"step": "step_s", "device": "device_busy_s", "bus": "bus_s", "host": "host_s"}
    panels = bars("a step and its bounds", found["rows"], values, "ms", MS)
    caption = f"ms; bars: at most {BOUND_GOAL} of the slowest, idle below {IDLE_BAR:.0%}"
    return Section("a step and its bounds", found["rows"], columns, caption, panels=panels)


PART = Part(
    "roofline", "an offloaded step over the slowest of device, bus and host", 5.0, _run, _section
)
