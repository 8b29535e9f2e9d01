"""Starts the contenders that train with nothing offloaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zero_engine.bench.gpu.part import Context, Row
from zero_engine.bench.gpu.training.job import Job
from zero_engine.bench.turns import take_turns

__all__ = ["train_in_turns"]


def train_in_turns(jobs: Sequence[Job], rounds: int, context: Context) -> dict[str, Row]:
    """A row per contender; see `zero_engine.bench.turns.take_turns`. The first round is traced."""
    traced = set()

    def run(job: Job) -> Row:
        if job.name in traced:
            job = replace(job, num_traced=0)
        elif job.num_traced:
            traced.add(job.name)
            job = replace(job, trace_file=str(context.traces / f"{job.name}.json.gz"))
        return context.runner.start("zero_engine.bench.gpu.training.rank", job.to_json())

    return take_turns(jobs, rounds, run, context.console.print)
