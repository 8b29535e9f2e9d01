"""Device time of a step, from torch.profiler's trace.

Events before and after a step would measure one stream from its first to its last operation, and
miss gaps and other streams. The profiler records every kernel and copy of every stream. The busy
time is the length of the union of the kernels' intervals, without copies.
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
        keep: file for the whole trace, as gzipped JSON for https://ui.perfetto.dev. On the CPU it
            is written too, but has no kernels.

    Returns:
        None if torch's profiler sees no kernels of the device, as on the CPU. A dict with
        ``failure`` if profiling fails, because the job's other measurements must survive.
    """
    supported = supported_activities()  # type: ignore[no-untyped-call]
    activity = getattr(ProfilerActivity, device.type.upper(), ProfilerActivity.CPU)
    activities = {ProfilerActivity.CPU, activity} & supported
    is_seen = activities > {ProfilerActivity.CPU}
    if not num_steps or not (is_seen or keep):
        return None
    try:
        synchronize(device)  # work enqueued earlier must not be in the trace
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

    ``busy_s`` is the time in which a kernel ran, ``d2h_s`` and ``h2d_s`` the time of copies in
    either direction, ``num_kernels`` the number of kernels. ``kernels`` lists those with the
    longest total time, with ``name``, ``s`` and ``calls``.
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
    """Return the seconds covered by the events of a trace, whose times are in microseconds."""
    total, end = 0.0, float("-inf")
    for start, duration in sorted((float(e["ts"]), float(e["dur"])) for e in events):
        total += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    return total * US


def _complete(events: Events, category: str) -> Events:
    return [e for e in events if e.get("cat") == category and e.get("ph") == "X"]
