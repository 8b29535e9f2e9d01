"""The rows alone, in a process of its own.

Started as ``python -m zero_engine.bench.comm_cuda.rows SIZE DEADLINE STORE RANK RESULT``; SIZE is
"real", on the accelerator, or "dry", on the CPU; DEADLINE a time of `time.time`. The result is
written row by row, the kinds and sizes that the bar is for first; what had no time is counted.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Any

import torch

from zero_engine.bench.comm_cuda.backends import find_accelerator, interpreted, on_device
from zero_engine.bench.comm_cuda.jobs import jobs
from zero_engine.bench.comm_cuda.measure import measure
from zero_engine.bench.comm_cuda.settings import BAR_NUMEL, DRY, REAL, Settings
from zero_engine.bench.comm_cuda.timing import Stopwatch
from zero_engine.bench.processes import write_result

FIRST_KINDS = ("int8", "int4")


def main() -> None:
    """Read the command line, measure, write the result."""
    size, deadline, _, _, result = sys.argv[1:]
    is_dry = size == "dry"
    device = torch.device("cpu") if is_dry else find_accelerator()
    backend = interpreted() if is_dry else on_device(device)
    stopwatch = Stopwatch(device)
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {"backend": backend.name, "rows": rows, "num_left": 0}
    for settings in _by_interest(DRY if is_dry else REAL):
        for job in jobs(settings, device):
            if time.time() > float(deadline):
                found["num_left"] += 1
                continue
            try:
                rows.append(measure(job, backend, settings, stopwatch, device))
            except Exception as error:  # a wrong result, a kernel that does not compile: a row
                rows.append({"name": job.name, "failure": f"{type(error).__name__}: {error}"})
            write_result(result, found)
    write_result(result, found)


def _by_interest(settings: Settings) -> list[Settings]:
    """The same in four parts: kinds and sizes of the bar, other sizes of theirs, other kinds."""
    first = tuple(kind for kind in settings.kinds if kind in FIRST_KINDS)
    others = tuple(kind for kind in settings.kinds if kind not in FIRST_KINDS)
    large = tuple(numel for numel in settings.numels if numel >= BAR_NUMEL)
    small = tuple(numel for numel in settings.numels if numel < BAR_NUMEL)
    return [
        replace(settings, kinds=kinds, numels=numels)
        for kinds in (first, others)
        for numels in (large, small)
    ]


if __name__ == "__main__":
    main()
