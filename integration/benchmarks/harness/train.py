"""The measuring loops. Each is a target of `benchmarks.harness.ranks`.

[Note: how a step is timed]
on the CPU          every step separately, from a barrier to the next one. Updates in the background
                    therefore count, in whichever step they run
on an accelerator   all timed steps together, divided by their number. Nothing waits in between, so
                    work that continues after ``step`` returns overlaps with the next step
"""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

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
from benchmarks.harness.tracing import synchronize, trace
from zero_engine.machine import processor_name

NUM_LOSSES = 20


def on_cpu(place: Place, job: Mapping[str, Any]) -> Row:
    """Train a job on this CPU rank. Return ``times_s``, ``losses``, memory in bytes and counters.

    ``counted`` has the seconds of file access in the timed steps.
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
    counted = side.kept.io_seconds()
    dist.barrier()
    times = timed_apart(lambda: losses.append(float(side.step(next(batches)))), what.steps)
    after = side.kept.io_seconds()
    peak = peak_bytes()
    dist.barrier()  # no rank may end while another still measures
    return {
        "times_s": times,
        "losses": losses,
        "added_bytes": peak - before,
        "counted": {name: value - counted[name] for name, value in after.items()},
    }


def on_device(place: Place, job: Mapping[str, Any]) -> Row:
    """Train a job on one device. Figures that the device does not have are None.

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
    step_s = timed_together(lambda: losses.append(side.step(next(following))), what.steps, device)
    peaks = device_peaks(device)
    before = side.kept.moved_bytes()
    losses += [side.step(next(following)) for _ in range(num_counted)]
    after = side.kept.moved_bytes()
    traced = trace(
        lambda: side.step(next(following)), what.num_traced, device, keep=what.trace_file
    )
    if what.is_offloaded:
        peaks = device_peaks(device)
    else:  # keeps about `NUM_LOSSES` losses, the last one included
        losses = losses[:: -max(1, len(losses) // NUM_LOSSES)][:NUM_LOSSES][::-1]
    allocated, reserved = peaks["device_peak_bytes"], peaks["device_reserved_bytes"]
    return {
        "device": _device_name(device),
        "num_parameters": what.shape.numel,
        "build_s": build_s,
        "step_s": step_s,
        "tokens_per_s": num_tokens / (step_s * what.steps),
        "losses": [float(loss) for loss in losses],
        "skipped_steps": 0 if side.engine is None else side.engine.skipped_steps,
        "host_share": side.kept.host_share(),
        "ratio_report": side.kept.ratio_report(),
        "moved_bytes": {name: value - before[name] for name, value in after.items()},
        "device_busy_s": None if traced is None else traced.get("busy_s"),
        "trace": traced,
        "device_limit_bytes": limit,
        **peaks,
        "reserved_to_allocated": reserved / allocated if reserved and allocated else None,
        "host_peak_bytes": watch.stop(),
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return processor_name()
    return str(torch.get_device_module(device).get_device_name(device))


def timed_apart(run: Callable[[], object], steps: int) -> list[float]:
    """Return the seconds of each call. All ranks begin each call together."""
    times = []
    for _ in range(steps):
        started_at = time.perf_counter()
        run()
        dist.barrier()
        times.append(time.perf_counter() - started_at)
    return times


def timed_together(run: Callable[[], object], steps: int, device: torch.device) -> float:
    synchronize(device)
    started_at = time.perf_counter()
    for _ in range(steps):
        run()
    synchronize(device)
    return (time.perf_counter() - started_at) / steps
