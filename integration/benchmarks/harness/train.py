"""The measuring loops. Each is a target of `benchmarks.harness.ranks`.

[Note: how a step is timed]
on the CPU          every step separately, from a barrier to the next one. Updates in the background
                    therefore count, in whichever step they run
on an accelerator   all timed steps together, divided by their number. Nothing waits in between, so
                    work that continues after ``step`` returns overlaps with the next step

[Note: device time]
Events before and after a step would measure one stream from its first to its last operation, and
miss gaps and other streams. The profiler records every kernel and copy of every stream. The busy
time is the length of the union of the kernels' intervals, without copies.
"""

from __future__ import annotations

import gc
import gzip
import importlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, supported_activities

from benchmarks.harness.job import Job
from benchmarks.harness.memory import (
    HostWatch,
    device_peaks,
    limit_device,
    peak_bytes,
    resident_bytes,
    restart_peak,
)
from benchmarks.harness.models import find_device
from benchmarks.harness.ranks import Place, Row
from benchmarks.harness.sides import SIDES
from zero_engine.machine import processor_name

US = 1e-6


def on_cpu(place: Place, job: Mapping[str, Any]) -> Row:
    """Train a job on this CPU rank. Return ``times_s``, ``losses``, memory in bytes and counters.

    ``counted`` has the seconds of file access and the bytes moved in the timed steps.
    """
    what = Job.of(job)
    torch.set_num_threads(what.threads)
    place.join()
    # Imports must not count as a contender's memory.
    importlib.import_module("torch.distributed.fsdp")
    what.meta_model()
    batches = what.batches(place.rank)
    restart_peak()
    before = resident_bytes()
    side = SIDES[what.side](what, torch.device("cpu"), place)
    losses = [float(side.step(next(batches))) for _ in range(what.warmup)]
    counted = side.kept.counters()
    dist.barrier()
    times = timed_apart(lambda: losses.append(float(side.step(next(batches)))), what.steps)
    after = side.kept.counters()
    peak = peak_bytes()
    dist.barrier()  # no rank may end while another still measures
    return {
        "times_s": times,
        "losses": losses,
        "added_bytes": peak - before,
        "counted": {name: value - counted[name] for name, value in after.items()},
    }


def on_device(place: Place, job: Mapping[str, Any]) -> Row:
    """Train a job on one device. Figures that cannot be measured there are None.

    Without offload, memory peaks are those of the timed steps only.
    """
    what = Job.of(job)
    if not what.is_offloaded:
        torch.set_float32_matmul_precision("high")  # allows TF32 for all sides
    device = find_device()
    limit = limit_device(what.device_limit_bytes, device)
    watch = HostWatch()
    started_at = time.perf_counter()
    side = SIDES[what.side](what, device, place)
    build_s = time.perf_counter() - started_at
    batches = what.batches(place.rank, device)
    losses = [side.step(next(batches)) for _ in range(what.warmup)]
    for _ in range(what.settling):
        if side.kept.ratio_report() is not None:
            break
        losses.append(side.step(next(batches)))
    # Prepared in advance, because copying a batch to the device would wait for the previous step.
    num_counted = 1 if what.is_offloaded else 0
    ready = [next(batches) for _ in range(what.steps + num_counted + what.num_traced)]
    num_tokens = sum(ids.numel() for ids in ready[: what.steps])
    if not what.is_offloaded:
        gc.collect()
        if device.type != "cpu":
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats(device)
    following = iter(ready)
    synchronize(device)
    started_at = time.perf_counter()
    losses += [side.step(next(following)) for _ in range(what.steps)]
    synchronize(device)
    step_s = (time.perf_counter() - started_at) / what.steps
    peaks = device_peaks(device)
    before = side.kept.moved_bytes()
    losses += [side.step(next(following)) for _ in range(num_counted)]
    after = side.kept.moved_bytes()
    traced: Row = {"device_busy_s": None}
    if what.num_traced and what.trace_file is not None:
        traced = trace(lambda: side.step(next(following)), what.num_traced, device, what.trace_file)
    if what.is_offloaded:
        peaks = device_peaks(device)
    name = processor_name()
    if device.type != "cpu":
        name = str(torch.get_device_module(device).get_device_name(device))
    allocated, reserved = peaks["device_peak_bytes"], peaks["device_reserved_bytes"]
    return {
        "device": name,
        "num_parameters": what.shape.numel,
        "build_s": build_s,
        "step_s": step_s,
        "tokens_per_s": num_tokens / (step_s * what.steps),
        "losses": [float(loss) for loss in losses],
        "skipped_steps": 0 if side.engine is None else side.engine.skipped_steps,
        "host_share": side.kept.host_share(),
        "ratio_report": side.kept.ratio_report(),
        "moved_bytes": {name: value - before[name] for name, value in after.items()},
        **traced,
        "device_limit_bytes": limit,
        **peaks,
        "reserved_to_allocated": reserved / allocated if reserved and allocated else None,
        "host_peak_bytes": watch.stop(),
    }


def timed_apart(run: Callable[[], object], steps: int) -> list[float]:
    """Return the seconds of each call. All ranks begin each call together."""
    times = []
    for _ in range(steps):
        started_at = time.perf_counter()
        run()
        dist.barrier()
        times.append(time.perf_counter() - started_at)
    return times


def trace(step: Callable[[], object], num_steps: int, device: torch.device, file: str) -> Row:
    """Trace ``num_steps`` calls of ``step`` into ``file``, for https://ui.perfetto.dev.

    Return ``device_busy_s`` per step, or None if torch's profiler sees no kernels of the device, as
    on the CPU. A failure becomes an entry, because the job's other measurements must survive it.
    """
    supported = supported_activities()  # type: ignore[no-untyped-call]
    activity = getattr(ProfilerActivity, device.type.upper(), ProfilerActivity.CPU)
    try:
        synchronize(device)  # work enqueued earlier must not be in the trace
        with profile(activities={ProfilerActivity.CPU, activity} & supported) as traced:
            for _ in range(num_steps):
                step()
            synchronize(device)
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        traced.export_chrome_trace(file)
        with gzip.open(file, "rt", encoding="utf-8") as text:
            kernels = [e for e in json.load(text)["traceEvents"] if e.get("cat") == "kernel"]
        return {"device_busy_s": busy_seconds(kernels) / num_steps or None}
    except Exception as error:
        return {"device_busy_s": None, "trace_failure": f"{type(error).__name__}: {error}"}


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def busy_seconds(events: Iterable[Mapping[str, Any]]) -> float:
    """Return the seconds covered by the events of a trace, whose times are in microseconds."""
    total, end = 0.0, float("-inf")
    for start, duration in sorted((float(e["ts"]), float(e["dur"])) for e in events):
        total += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    return total * US
