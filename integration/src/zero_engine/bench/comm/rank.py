"""One rank of one contender: measure at every rate, write what was found to a file, end.

Started by torchrun as ``python -m zero_engine.bench.comm.rank CONTENDER JOB_JSON DEVICE FOLDER``,
DEVICE being the node's end of the link. A failure is written there too, for torchrun's own last
words do not tell it.

A step is timed from the moment all ranks begin it to the moment all ranks begin the next one: what
a rank still does in the background after its ``step`` has returned counts, wherever it falls.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zero_engine.bench.comm.contenders import CONTENDERS
from zero_engine.bench.comm.job import Job
from zero_engine.bench.comm.link import limit_command, sent_bytes

__all__ = ["measure"]


def measure(contender: str, job: Job, device: str) -> list[dict[str, Any]]:
    """Run the contender on this rank; what was found at each of the job's rates."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = _measure(contender, job, device)
    gc.collect()  # an engine that still held the group would end its threads only at exit
    dist.destroy_process_group()
    return found


def _measure(contender: str, job: Job, device: str) -> list[dict[str, Any]]:
    batch = job.batch(dist.get_rank())
    made = CONTENDERS[contender](contender, job)
    found = []
    for rate in job.rates:
        _limit(device, rate)
        losses = [float(made.step(batch)) for _ in range(job.warmup)]
        found.append(_timed(lambda: float(made.step(batch)), job.steps, device, losses))
        found[-1]["counted_bytes"] = made.counted()
    return found


def _limit(device: str, rate: int) -> None:
    dist.barrier()
    if os.environ["LOCAL_RANK"] == "0":
        subprocess.run(limit_command(device, rate), check=True)
    dist.barrier()


def _timed(
    step: Callable[[], float], steps: int, device: str, losses: list[float]
) -> dict[str, Any]:
    """The timed steps; seconds, and bytes that this node sent meanwhile."""
    times = []
    dist.barrier()
    sent, cpu_s = sent_bytes(device), time.process_time()
    for _ in range(steps):
        started_at = time.perf_counter()
        losses.append(step())
        dist.barrier()
        times.append(time.perf_counter() - started_at)
    found = {
        "times_s": times,
        "sent_bytes": sent_bytes(device) - sent,
        "cpu_s": time.process_time() - cpu_s,
        "losses": losses,
    }
    dist.barrier()  # nobody goes on while another still reads its counter
    return found


def main() -> None:
    """Read the command line, measure, write the result or the failure."""
    contender, job, device, folder = sys.argv[1:]
    path = Path(folder, f"rank{os.environ['RANK']}.json")
    try:
        found = measure(contender, Job.from_json(job), device)
    except BaseException as error:
        said = " ".join(str(error).split())
        path.with_suffix(".failure").write_text(f"{type(error).__name__}: {said}", encoding="utf-8")
        raise
    path.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
