"""One rank of one contender: measure, write the result to a file, end.

Started by `zero_engine.bench.engine` as
``python -m zero_engine.bench.worker CONTENDER WORKLOAD_JSON STORE RANK RESULT``.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from zero_engine.bench.contenders import CONTENDERS
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
    step = CONTENDERS[contender](workload)
    losses = [float(step(next(batches))) for _ in range(workload.warmup)]
    times = []
    for _ in range(workload.steps):
        dist.barrier()
        started_at = time.perf_counter()
        losses.append(float(step(next(batches))))
        times.append(time.perf_counter() - started_at)
    dist.barrier()
    peak = peak_bytes()
    dist.barrier()  # nobody ends while another still measures
    del step
    gc.collect()  # an engine that still held the group would end its threads only at exit
    dist.destroy_process_group()
    return {"times_s": times, "losses": losses, "before_bytes": before, "peak_bytes": peak}


def main() -> None:
    """Read the command line, measure, write the result."""
    contender, workload, store, rank, result = sys.argv[1:]
    measured = measure(contender, Workload(**json.loads(workload)), store, int(rank))
    Path(result).write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    main()
