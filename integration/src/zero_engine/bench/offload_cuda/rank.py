"""One contender in one fresh process: train, measure, write what was found to a file, end.

Started as ``python -m zero_engine.bench.offload_cuda.rank JOB_JSON STORE RANK RESULT``.

A step's time is that of all timed steps together over their number: nothing waits in between, so
that what a contender still does after its ``step`` has returned overlaps with the next step. What
of it is under way at the beginning of the first is as much as is under way at the end of the last.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zero_engine.bench.offload_cuda.host_memory import HostWatch
from zero_engine.bench.offload_cuda.jobs import Job, find_device
from zero_engine.bench.offload_cuda.sides import SIDES
from zero_engine.bench.offload_cuda.tracing import trace
from zero_engine.machine import processor_name

__all__ = ["device_name", "device_peaks", "measure", "timed"]


def measure(job: Job, store: str) -> dict[str, Any]:
    """Run the job; times in seconds, memory in bytes, null where the device cannot tell."""
    device = find_device()
    limit = _limit_device(job.device_limit_bytes, device)
    watch = HostWatch()
    started_at = time.perf_counter()
    side = SIDES[job.side](job, device, store)
    build_s = time.perf_counter() - started_at
    batches = job.batches(device)
    losses = [side.step(next(batches)) for _ in range(job.warmup)]
    for _ in range(job.settling):
        if side.kept.ratio_report() is not None:
            break
        losses.append(side.step(next(batches)))
    # Made before: a copy to the device would wait for the step before it.
    ready = iter([next(batches) for _ in range(job.steps + 1 + job.num_traced)])
    step_s = timed(lambda: losses.append(side.step(next(ready))), job.steps, device)
    before = side.kept.bytes_moved()
    losses.append(side.step(next(ready)))
    after = side.kept.bytes_moved()
    traced = trace(lambda: side.step(next(ready)), job.num_traced, device, keep=job.trace_file)
    tokens = job.micro_batch * job.shape.context
    return {
        "device": device_name(device),
        "num_parameters": job.shape.numel,
        "build_s": build_s,
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "losses": [float(loss) for loss in losses],
        "skipped_steps": side.skipped_steps(),
        "host_share": side.kept.host_share(),
        "ratio_report": side.kept.ratio_report(),
        "moved_bytes": {name: value - before[name] for name, value in after.items()},
        "device_busy_s": None if traced is None else traced.get("busy_s"),
        "trace": traced,
        "device_limit_bytes": limit,
        **device_peaks(device),
        "host_peak_bytes": watch.stop(),
    }


def device_name(device: torch.device) -> str:
    """Of the accelerator, or of the processor."""
    if device.type == "cpu":
        return processor_name()
    return str(torch.get_device_module(device).get_device_name(device))


def device_peaks(device: torch.device) -> dict[str, int | None]:
    """The most that tensors took, and the most that torch's allocator took for them."""
    if device.type == "cpu":
        return {"device_peak_bytes": None, "device_reserved_bytes": None}
    return {
        "device_peak_bytes": torch.accelerator.max_memory_allocated(device),
        "device_reserved_bytes": torch.accelerator.max_memory_reserved(device),
    }


def timed(run: Callable[[], object], steps: int, device: torch.device) -> float:
    """Seconds per call."""
    _synchronize(device)
    started_at = time.perf_counter()
    for _ in range(steps):
        run()
    _synchronize(device)
    return (time.perf_counter() - started_at) / steps


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _limit_device(limit_bytes: int | None, device: torch.device) -> int | None:
    """Allow torch's allocator so many bytes; those, or None where nothing was limited.

    Raises:
        RuntimeError: the device has less, or its module cannot limit it.
    """
    if limit_bytes is None or device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    if not hasattr(module, "set_per_process_memory_fraction"):
        raise RuntimeError(
            f"torch.{device.type} has no set_per_process_memory_fraction: its memory cannot be "
            f"limited to {limit_bytes} bytes"
        )
    _, total = torch.accelerator.get_memory_info(device)
    if total < limit_bytes:
        raise RuntimeError(f"the device has {total} bytes, less than the limit of {limit_bytes}")
    module.set_per_process_memory_fraction(limit_bytes / total, device)
    return limit_bytes


def main() -> None:
    """Read the command line, measure, write the result."""
    job, store, _, result = sys.argv[1:]
    found = measure(Job.from_json(job), store)
    Path(result).write_text(json.dumps(found), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
