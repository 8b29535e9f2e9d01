"""Triton's kernels of the block quantizer against copy bandwidth.

The rows of `benchmarks.experiments.comm_cuda`, within the time.
"""

from __future__ import annotations

import time

from benchmarks.experiments import comm_cuda
from benchmarks.experiments.gpu.part import Context, Part
from benchmarks.harness.ranks import Row
from benchmarks.harness.report import Section

MEASURING = 0.8
"""Share of the part's time in which a row may begin."""


def _run(context: Context) -> Row:
    # It stops by itself before it would be ended.
    deadline = time.time() + MEASURING * context.runner.left_s()
    settings = comm_cuda.DRY if context.is_dry_run else comm_cuda.REAL
    found = comm_cuda.start(settings, context.runner, deadline)
    return {"bar": comm_cuda.BAR, "backend": found["backend"], "rows": found["rows"]}


def _section(found: Row) -> Section:
    title = f"{found['backend']} kernels, the largest tensors"
    return comm_cuda.section(title, found["rows"], is_short=True)


PART = Part("quantizers", "Triton's quantizer kernels against copy bandwidth", 3.0, _run, _section)
