"""A part of the accelerator benchmark.

A row is the JSON result of one case. A case without figures has the reason as ``failure`` or
``skipped``. ``is_met`` says whether a row meets the part's bar. It is None where the bar does not
apply to the case or the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.harness.job import Job
from benchmarks.harness.models import GptShape
from benchmarks.harness.ranks import Row, Runner
from benchmarks.harness.report import Section

IN_MEMORY = GptShape(layers=24, width=1024, heads=16, vocab=50257, context=1024)
"""The model trained without offload."""


@dataclass(frozen=True)
class Context:
    """Inputs of a part's measurement.

    Attributes:
        is_dry_run: whether to use tiny sizes on the CPU.
        runner: starts processes within the part's time limit. Each begins with an empty device.
        traces: folder of the part's torch.profiler traces.
    """

    is_dry_run: bool
    runner: Runner
    traces: Path

    def sized(self, job: Job) -> Job:
        return job.dry() if self.is_dry_run else job

    def traced(self, job: Job, num_steps: int) -> Job:
        """Return the job with ``num_steps`` traced steps and a file for their trace."""
        return replace(
            job, num_traced=num_steps, trace_file=str(self.traces / f"{job.name}.json.gz")
        )


@dataclass(frozen=True)
class Part:
    """One measurement with its bar.

    Attributes:
        name: value of the option ``--only``.
        about: description in one line.
        share: weight of this part when the remaining time is divided among the remaining parts.
        run: measures. Returns ``{"rows": {name: row}}`` and figures common to all rows.
        section: makes the table from the result of ``run``. Called only if a row has figures.
    """

    name: str
    about: str
    share: float
    run: Callable[[Context], Row]
    section: Callable[[Row], Section]
