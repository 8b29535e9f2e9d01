"""The rows alone, in a process of its own.

Started as ``python -m zero_engine.bench.comm_cuda.rows SIZE LIMIT_S STORE RANK RESULT``; SIZE is
"real", on the accelerator, or "dry", on the CPU. What is not measured within LIMIT_S is left out
and counted.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from zero_engine.bench.comm_cuda.backends import find_accelerator, interpreted, on_device
from zero_engine.bench.comm_cuda.jobs import jobs
from zero_engine.bench.comm_cuda.measure import measure
from zero_engine.bench.comm_cuda.settings import DRY, REAL
from zero_engine.bench.comm_cuda.timing import Stopwatch


def main() -> None:
    """Read the command line, measure, write the result."""
    started_at = time.monotonic()
    size, limit_s, _, _, result = sys.argv[1:]
    is_dry = size == "dry"
    settings = DRY if is_dry else REAL
    device = torch.device("cpu") if is_dry else find_accelerator()
    backend = interpreted() if is_dry else on_device(device)
    stopwatch = Stopwatch(device)
    rows, num_left = [], 0
    for job in jobs(settings, device):
        if time.monotonic() - started_at > float(limit_s):
            num_left += 1
        else:
            rows.append(measure(job, backend, settings, stopwatch, device))
    found = {"backend": backend.name, "rows": rows, "num_left": num_left}
    Path(result).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
