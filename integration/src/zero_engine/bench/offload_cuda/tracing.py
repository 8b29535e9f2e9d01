"""How long the device computes in a step, from torch.profiler's trace.

Events around a step would tell when its work began and ended on one stream, not the gaps within it
nor what other streams do. The profiler records every kernel of every stream, on each accelerator
that it supports; the busy time is the union of their intervals, copies left out.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

__all__ = ["busy_seconds", "trace_busy_seconds"]

US = 1e-6


def trace_busy_seconds(run: Callable[[], object], device: torch.device) -> float | None:
    """Seconds in which at least one kernel ran on the device while ``run`` did.

    None if torch's profiler does not see the device's kernels (the CPU has none).
    """
    supported = supported_activities()  # type: ignore[no-untyped-call]
    activity = getattr(ProfilerActivity, device.type.upper(), None)
    if device.type == "cpu" or activity is None or activity not in supported:
        return None
    torch.accelerator.synchronize(device)  # what was enqueued before is not counted
    with profile(activities=[ProfilerActivity.CPU, activity]) as traced:
        run()
        torch.accelerator.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        traced.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return busy_seconds(events) or None


def busy_seconds(events: Iterable[Mapping[str, Any]]) -> float:
    """The length of the union of all kernels' intervals in a trace, whose times are in us."""
    kernels = [e for e in events if e.get("cat") == "kernel" and e.get("ph") == "X"]
    total, end = 0.0, float("-inf")
    for start, duration in sorted((float(e["ts"]), float(e["dur"])) for e in kernels):
        total += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    return total * US
