"""Step time and peak memory: bare model, DDP, FSDP2, DeepSpeed, and this engine.

Overhead is the step time minus the time of the bare forward and backward in the same run.

[Note: the engine itself]
CPU time of forward and backward in the engine's main thread minus the bare model's time, per unit
and pass. The model's tensors are tiny and the collectives do nothing. What remains is Python and
torch's dispatch of the engine's few operations (gradient copies, norms).
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor

import zero_core
from benchmarks.harness import options
from benchmarks.harness.job import Job
from benchmarks.harness.models import GptShape
from benchmarks.harness.options import RESULTS, Output, of, parse_size
from benchmarks.harness.ranks import Place, Row, Runner
from benchmarks.harness.report import (
    MS,
    Column,
    Panel,
    Rows,
    Section,
    bars,
    green,
    machine,
    publish,
)
from benchmarks.harness.rounds import measured, quotient, race_on_cpu, start_ranks

SMALL = Job(
    *("", "zero", GptShape(layers=12, width=64, heads=1, vocab=8192, context=8)),
    micro_batch=1,
    steps=0,
    warmup=10,
    model="gpt2",
    ranks=2,
    # The silent collectives leave arbitrary values, whose norm must not stop the step.
    top={"check_grad_overflow": False},
)
SHORT_STEPS = 10
"""Steps in which the engine itself is measured, as a multiple of ``--steps``."""
VOCAB = 8192
Contenders = Mapping[str, tuple[str, int, Mapping[str, Any]]]
"""Maps a name to side, stage and further keys of ``zero_optimization``. ``zero-N`` is this engine
at stage N."""
CONTENDERS: Contenders = {
    "bare": ("bare", 0, {}),
    "ddp": ("ddp", 0, {}),
    "fsdp2": ("fsdp2", 3, {}),
    **{f"deepspeed-{stage}": ("deepspeed", stage, {}) for stage in (1, 2, 3)},
    **{f"zero-{stage}": ("zero", stage, {}) for stage in range(4)},
    "zero-3-offload": ("zero", 3, {"offload_optimizer": {"device": "cpu"}}),
}


def main(
    rounds: options.Rounds = 2,
    steps: options.Steps = 6,
    ranks: options.Ranks = None,
    size: options.Sizes = None,
    only: Annotated[list[str] | None, of(CONTENDERS)] = None,
    output: Output = RESULTS,
) -> None:
    chosen = {name: CONTENDERS[name] for name in only or CONTENDERS}
    runner = Runner()
    found = [
        (jobs[0], race_on_cpu(jobs, rounds, runner))
        for jobs in races(chosen, size or ("6x512", "12x896"), ranks or (2, 4), steps)
    ]
    python = {f"stage {number}": overhead(number, steps, runner) for number in range(4)}
    sections = [section(job.title, rows) for job, rows in found]
    report = {**report_of(found, rounds=rounds), "python": python}
    publish(output, "engine", report, [*sections, python_section(python)], columns=2)


def races(
    contenders: Contenders, sizes: Sequence[str], ranks: Sequence[int], steps: int
) -> list[list[Job]]:
    """Return the contenders' jobs in fp32, a list per model size and number of ranks."""
    shapes = [parse_size(size, vocab=VOCAB, context=128) for size in sizes]
    return [
        [
            Job(
                *(name, side, shape, 2, steps, 2),
                model="gpt2",
                lr=3e-4,
                stage=stage,
                zero=zero,
                ranks=count,
            )
            for name, (side, stage, zero) in contenders.items()
        ]
        for shape in shapes
        for count in ranks
    ]


def report_of(runs: Sequence[tuple[Job, Rows]], **about: Any) -> Row:
    listed = [{"workload": job.workload, "contenders": rows} for job, rows in runs]
    return {**about, "machine": machine(), "runs": listed}


def panels(title: str, rows: Rows) -> list[Panel]:
    color = green(lambda name: name.startswith("zero"))
    memory = "peak memory per rank over the imports (MiB)"
    return [
        *bars(title, rows, {"": "median_s"}, "median step time (ms)", MS, color=color),
        *bars("", rows, {"": "added_mib_per_rank"}, memory, color=color),
    ]


def overhead(stage: int, steps: int, runner: Runner) -> Row:
    """Return the rank with the most overhead. See [Note: the engine itself]."""
    job = replace(SMALL, stage=stage)
    arguments = {"job": job, "steps": SHORT_STEPS * steps}
    found = start_ranks(f"{__name__}:measure", arguments, job, runner)
    return max(found.get("ranks", [found]), key=lambda row: float(row.get("overhead_us", 0.0)))


class _Silent:
    """Collectives that do nothing and leave their output buffers unchanged."""

    def all_gather(
        self, out: Tensor, shard: Tensor, *, unit: int, version: int, backward: bool
    ) -> _Silent:
        return self

    def reduce_scatter(self, out: Tensor, full: Tensor, *, unit: int) -> _Silent:
        return self

    def wait(self) -> None:
        return None


def measure(place: Place, job: Mapping[str, Any], steps: int) -> Row:
    """Return microseconds per unit and pass over ``steps`` steps. See [Note: the engine itself]."""
    what = Job.of(job)
    torch.set_num_threads(1)
    place.join()
    engine = zero_core.build(what.make_model(), what.config(), collectives=_Silent())
    bare = what.make_model()
    batches = what.batches(place.rank)

    def run_bare(ids: Tensor) -> None:
        torch.autograd.backward(bare(ids))

    def run_engine(ids: Tensor) -> None:
        engine.backward(engine(ids))

    gc.collect()
    gc.freeze()  # the garbage collector then skips the objects that exist now
    passes = 2 * len(engine.layout.units)
    added_s = []
    for turn in range(what.warmup + steps):
        ids = next(batches)
        times = [_thread_seconds(run, ids) for run in (run_bare, run_engine)]
        if turn >= what.warmup:
            added_s.append(times)
        engine.step()
        bare.zero_grad()
    bare_s, engine_s = (statistics.median(found) for found in zip(*added_s, strict=True))
    return {"overhead_us": (engine_s - bare_s) / passes * 1e6}


def _thread_seconds(run: Callable[[Tensor], None], ids: Tensor) -> float:
    started_at = time.thread_time()
    run(ids)
    return time.thread_time() - started_at


def python_section(by_stage: Rows) -> Section:
    columns = (Column("overhead, us", "overhead_us", ".0f"),)
    caption = "no compute, no communication: Python and torch's dispatch"
    return Section("the engine itself, per unit and pass", by_stage, columns, caption)


def section(title: str, rows: Rows) -> Section:
    medians = {name: row["median_s"] for name, row in measured(rows).items()}
    bare, ddp = medians.get("bare"), medians.get("ddp")

    def over(row: Row) -> float | None:
        return None if bare is None else float(row["median_s"]) - bare

    ddp_over = None if ddp is None or bare is None else ddp - bare
    columns = (
        Column("step", "median_s", ".0f", MS),
        Column("min", "min_s", ".0f", MS),
        Column("to DDP", lambda row: quotient(row["median_s"], ddp), ".2f"),
        Column("overhead", over, "+.0f", MS),
        Column("to DDP's", lambda row: quotient(over(row) or None, ddp_over), ".2f"),
        Column("memory", "added_mib_per_rank", ".0f"),
        Column("loss", "last_loss", ".6f"),
    )
    caption = "medians, ms; overhead: over the bare forward and backward; memory: MiB per rank"
    named = f"one training step: {title}"
    return Section(named, rows, columns, caption, "contender", panels(title, rows))
