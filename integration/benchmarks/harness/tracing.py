"""The device's work in a step, from torch.profiler's trace.

Events around a step would tell when its work began and ended on one stream, not the gaps within it
nor what other streams do. The profiler records every kernel and copy of every stream, on each
accelerator that it supports; the busy time is the union of the kernels' intervals, copies left out.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

US = 1e-6
NUM_KERNELS = 10
NAME_LENGTH = 100
"""Characters kept of a kernel's name. Names of C++ templates are long."""
Events = Sequence[Mapping[str, Any]]


def trace(
    step: Callable[[], object], num_steps: int, device: torch.device, *, keep: str | None = None
) -> dict[str, Any] | None:
    """Trace ``num_steps`` calls of ``step`` and return their `summary`.

    Args:
        step: is called.
        num_steps: how often.
        device: whose kernels are recorded.
        keep: a file for the trace itself, gzipped JSON, for https://ui.perfetto.dev; of the CPU
            too, which has no kernels.

    Returns:
        None if torch's profiler sees no kernels of the device (the CPU has none); ``failure`` with
        the reason if it fails: what else was measured is not lost by that.
    """
    supported = supported_activities()  # type: ignore[no-untyped-call]
    activity = getattr(ProfilerActivity, device.type.upper(), ProfilerActivity.CPU)
    activities = {ProfilerActivity.CPU, activity} & supported
    is_seen = activities > {ProfilerActivity.CPU}
    if not num_steps or not (is_seen or keep):
        return None
    try:
        synchronize(device)  # what was enqueued before is not counted
        with profile(activities=activities) as traced:
            for _ in range(num_steps):
                step()
            synchronize(device)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(keep or Path(folder, "trace.json.gz"))
            path.parent.mkdir(parents=True, exist_ok=True)
            traced.export_chrome_trace(str(path))
            with gzip.open(path, "rt", encoding="utf-8") as file:
                return summary(json.load(file)["traceEvents"], num_steps) if is_seen else None
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {error}"}


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def summary(events: Events, num_steps: int) -> dict[str, Any] | None:
    """Return figures of a trace per step, or None if it has no kernels.

    ``busy_s``: at least one kernel ran; ``d2h_s``, ``h2d_s``: a copy that way was under way;
    ``num_kernels``; ``kernels``: those that took longest in all, with ``name``, ``s``, ``calls``.
    """
    kernels = _complete(events, "kernel")
    if not kernels:
        return None
    copies = _complete(events, "gpu_memcpy")
    ways = {"d2h_s": "DtoH", "h2d_s": "HtoD"}
    by_name: dict[str, list[float]] = {}
    for event in kernels:
        by_name.setdefault(event["name"][:NAME_LENGTH], []).append(float(event["dur"]) * US)
    longest = sorted(by_name.items(), key=lambda item: sum(item[1]), reverse=True)
    return {
        "busy_s": busy_seconds(kernels) / num_steps,
        **{
            key: busy_seconds(e for e in copies if way in e["name"]) / num_steps
            for key, way in ways.items()
        },
        "num_kernels": len(kernels) / num_steps,
        "kernels": [
            {"name": name, "s": sum(times) / num_steps, "calls": len(times) / num_steps}
            for name, times in longest[:NUM_KERNELS]
        ],
    }


def busy_seconds(events: Iterable[Mapping[str, Any]]) -> float:
    """The length of the union of the intervals of a trace's events, whose times are in us."""
    total, end = 0.0, float("-inf")
    for start, duration in sorted((float(e["ts"]), float(e["dur"])) for e in events):
        total += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    return total * US


def _complete(events: Events, category: str) -> Events:
    return [e for e in events if e.get("cat") == category and e.get("ph") == "X"]
