"""One contender in one fresh process: train, measure, write what was found to a file, end.

Started as ``python -m zero_engine.bench.gpu.training.rank JOB_JSON STORE RANK RESULT``.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_engine.bench.gpu.training.job import Job
from zero_engine.bench.gpu.training.sides import SIDES
from zero_engine.bench.offload_cuda.jobs import find_device
from zero_engine.bench.offload_cuda.rank import device_name, device_peaks, timed
from zero_engine.bench.offload_cuda.tracing import trace

__all__ = ["measure"]


def measure(job: Job, store: str) -> dict[str, Any]:
    """Run the job; times in seconds, memory in bytes, null where the device cannot tell.

    Peaks are those of the timed steps, what is held in between included.
    """
    torch.set_float32_matmul_precision("high")  # TF32 where there is some, on every side
    device = find_device()
    started_at = time.perf_counter()
    step = SIDES[job.side](job, device, store)
    build_s = time.perf_counter() - started_at
    batches = job.batches(device)
    losses = [step(next(batches)) for _ in range(job.warmup)]
    # Made before: a copy to the device would wait for the step before it.
    ready = [next(batches) for _ in range(job.steps + job.num_traced)]
    num_tokens = sum(ids.numel() for ids in ready[: job.steps])
    _forget_the_past(device)
    following = iter(ready)
    step_s = timed(lambda: losses.append(step(next(following))), job.steps, device)
    peaks = device_peaks(device)
    traced = trace(lambda: step(next(following)), job.num_traced, device, keep=job.trace_file)
    reserved, allocated = peaks["device_reserved_bytes"], peaks["device_peak_bytes"]
    return {
        "device": device_name(device),
        "num_parameters": job.shape.numel,
        "build_s": build_s,
        "step_s": step_s,
        "tokens_per_s": num_tokens / (step_s * job.steps),
        "losses": _few(losses),
        "trace": traced,
        **peaks,
        "reserved_to_allocated": None if not reserved or not allocated else reserved / allocated,
    }


def _forget_the_past(device: torch.device) -> None:
    """What building has left in the allocator is no part of the steps' peaks."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)


def _few(losses: list[Tensor]) -> list[float]:
    """At most 20 of them, the last among them."""
    every = max(1, len(losses) // 20)
    return [float(loss) for loss in losses[::-1][::every][::-1][-20:]]


def main() -> None:
    """Read the command line, measure, write the result."""
    job, store, _, result = sys.argv[1:]
    found = measure(Job.from_json(job), store)
    Path(result).write_text(json.dumps(found), encoding="utf-8")
    if dist.is_initialized():
        gc.collect()  # an engine that still held the group would end its threads only at exit
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
