"""One rank of one contender: measure, write the result to a file, end.

Started by `zero_engine.bench.measured` as
``python -m zero_engine.bench.worker CONTENDER WORKLOAD_JSON STORE RANK RESULT``.

A step is timed from the moment all ranks begin it to the moment all ranks begin the next one: what
a rank still does in the background after its ``step`` has returned counts, wherever it falls.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from zero_engine.bench.contenders import CONTENDERS, CountingStep, Step
from zero_engine.bench.offload_contenders import OFFLOADERS
from zero_engine.bench.resident import peak_bytes, resident_bytes, restart_peak
from zero_engine.bench.workload import Workload


def measure(contender: str, workload: Workload, store: str, rank: int) -> dict[str, object]:
    """Run the contender on this rank; times in seconds, memory in bytes."""
    torch.set_num_threads(workload.threads)
    store_of_ranks = dist.FileStore(store, workload.ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store_of_ranks, rank=rank, world_size=workload.ranks)
    batches = workload.batches(rank)
    restart_peak()
    before = resident_bytes()
    step = {**CONTENDERS, **OFFLOADERS}[contender](workload)
    losses = [float(step(next(batches))) for _ in range(workload.warmup)]
    times = []
    counted = _counters(step)
    dist.barrier()
    for _ in range(workload.steps):
        started_at = time.perf_counter()
        losses.append(float(step(next(batches))))
        dist.barrier()
        times.append(time.perf_counter() - started_at)
    counted = {name: value - counted[name] for name, value in _counters(step).items()}
    peak = peak_bytes()
    dist.barrier()  # nobody ends while another still measures
    del step
    gc.collect()  # an engine that still held the group would end its threads only at exit
    dist.destroy_process_group()
    return {
        "times_s": times,
        "losses": losses,
        "before_bytes": before,
        "peak_bytes": peak,
        "counted": counted,
    }


def _counters(step: Step) -> Mapping[str, float]:
    return dict(step.counters()) if isinstance(step, CountingStep) else {}


def main() -> None:
    """Read the command line, measure, write the result."""
    contender, workload, store, rank, result = sys.argv[1:]
    measured = measure(contender, Workload(**json.loads(workload)), store, int(rank))
    Path(result).write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    main()
