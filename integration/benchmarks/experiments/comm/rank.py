"""One rank of one contender, measured at every rate of the link."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.experiments.comm.link import limit_command, sent_bytes
from benchmarks.harness.job import Job
from benchmarks.harness.ranks import Place, Row
from benchmarks.harness.sides import SIDES
from benchmarks.harness.train import timed_apart


def measure(place: Place, job: Mapping[str, Any], rates: Sequence[int], device: str) -> Row:
    """Return a row per rate: seconds, losses, and bytes that ``device`` of this node sent.

    ``counted_bytes`` are those that this rank sent to the other node in the last step, by the
    engine's own count; null for others.
    """
    what = Job.of(job)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batch = next(what.batches(place.rank))
    side = SIDES[what.side](what, torch.device("cpu"), place)
    found = []
    for rate in rates:
        _limit(device, rate)
        losses = [float(side.step(batch)) for _ in range(what.warmup)]
        dist.barrier()
        sent, cpu_s = sent_bytes(device), time.process_time()
        times = timed_apart(lambda: losses.append(float(side.step(batch))), what.steps)  # noqa: B023
        row: Row = {
            "times_s": times,
            "sent_bytes": sent_bytes(device) - sent,
            "cpu_s": time.process_time() - cpu_s,
            "losses": losses,
            "counted_bytes": None,
        }
        if side.engine is not None:
            report = side.engine.comm_report()
            row["counted_bytes"] = sum(kind.between_nodes_bytes for kind in report)
        found.append(row)
        dist.barrier()  # nobody goes on while another still reads its counter
    return {"rates": found}


def _limit(device: str, rate: int) -> None:
    dist.barrier()
    if os.environ["LOCAL_RANK"] == "0":
        subprocess.run(limit_command(device, rate), check=True)
    dist.barrier()
