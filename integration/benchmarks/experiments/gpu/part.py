"""A part of a program for accelerators: one question to the device.

A row is the result of one case, as JSON. A case without figures has ``failure`` or ``skipped`` with
the reason instead. ``is_met`` is the verdict on the part's bar: null where the bar is not for this
case, or for this device.
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
"""The model of all parts without offload."""


@dataclass(frozen=True)
class Context:
    """The means of a part.

    Attributes:
        is_dry_run: tiny sizes, on the CPU.
        runner: starts processes within the part's time, so that each begins with an empty device.
        traces: folder for torch.profiler's traces, of this part.
    """

    is_dry_run: bool
    runner: Runner
    traces: Path

    def sized(self, job: Job) -> Job:
        """Return the job, in a dry run a tiny one."""
        return job.dry() if self.is_dry_run else job

    def traced(self, job: Job, num_steps: int) -> Job:
        """Return the job with so many steps whose kernels are traced, in a file of its name."""
        return replace(
            job, num_traced=num_steps, trace_file=str(self.traces / f"{job.name}.json.gz")
        )


@dataclass(frozen=True)
class Part:
    """One question to the device, with its bar.

    Attributes:
        name: as `--only` takes it.
        about: one line.
        share: of the remaining time, relative to the parts that are still to run.
        run: measures; returns ``{"rows": {name: row}}`` and figures of all rows together.
        section: of the result of ``run``, short; called if there are rows with figures.
    """

    name: str
    about: str
    share: float
    run: Callable[[Context], Row]
    section: Callable[[Row], Section]
