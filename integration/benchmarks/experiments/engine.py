"""Step time and peak memory: bare model, DDP, FSDP2, DeepSpeed, and this engine.

Overhead is the step less the bare forward and backward of the same run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from benchmarks.experiments.python_time import SMALL
from benchmarks.harness import options
from benchmarks.harness.job import Job
from benchmarks.harness.options import RESULTS, Output, of, parse_size
from benchmarks.harness.ranks import Row, Runner
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

SHORT_STEPS = 10
"""Steps in `python_time` for each timed step of a workload."""
VOCAB, MODEL = 8192, "gpt2"
HOST = {"offload_optimizer": {"device": "cpu", "ratio": 1.0}}
Contenders = Mapping[str, tuple[str, int, Mapping[str, Any]]]
"""Maps a name to side, stage and further keys of ``zero_optimization``. ``zero-N`` is this engine
at stage N."""
CONTENDERS: Contenders = {
    "bare": ("bare", 0, {}),
    "ddp": ("ddp", 0, {}),
    "fsdp2": ("fsdp2", 3, {}),
    **{f"deepspeed-{stage}": ("deepspeed", stage, {}) for stage in (1, 2, 3)},
    **{f"zero-{stage}": ("zero", stage, {}) for stage in range(4)},
    "zero-3-offload": ("zero", 3, HOST),
}


def main(
    rounds: options.Rounds = 2,
    steps: options.Steps = 6,
    ranks: options.Ranks = None,
    size: options.Sizes = None,
    only: Annotated[list[str] | None, of(CONTENDERS)] = None,
    output: Output = RESULTS,
) -> None:
    """Measure, write ``engine.json`` and ``engine.png``, print a table per workload."""
    chosen = {name: CONTENDERS[name] for name in only or CONTENDERS}
    runner = Runner()
    found = [
        (jobs[0], race_on_cpu(jobs, rounds, runner))
        for jobs in races(chosen, size or ("6x512", "12x896"), ranks or (2, 4), steps)
    ]
    python = {f"stage {number}": python_time(number, steps, runner) for number in range(4)}
    sections = [section(job.title, rows) for job, rows in found]
    report = {**report_of(found, rounds=rounds), "python": python}
    publish(output, "engine", report, [*sections, python_section(python)], columns=2)


def races(
    contenders: Contenders, sizes: Sequence[str], ranks: Sequence[int], steps: int
) -> list[list[Job]]:
    """Return the contenders' jobs in fp32, a list for each size and number of ranks."""
    shapes = [parse_size(size, vocab=VOCAB, context=128) for size in sizes]
    return [
        [
            Job(
                *(name, side, shape, 2, steps, 2),
                model=MODEL,
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
    """Return the JSON of contenders on the CPU."""
    listed = [{"workload": job.workload, "contenders": rows} for job, rows in runs]
    return {**about, "machine": machine(), "runs": listed}


def panels(title: str, rows: Rows) -> list[Panel]:
    color = green(lambda name: name.startswith("zero"))
    memory = "peak memory per rank over the imports (MiB)"
    return [
        *bars(title, rows, {"": "median_s"}, "median step time (ms)", MS, color=color),
        *bars("", rows, {"": "added_mib_per_rank"}, memory, color=color),
    ]


def python_time(stage: int, steps: int, runner: Runner) -> Row:
    """Return the worst rank's figures. See `benchmarks.experiments.python_time`."""
    job = replace(SMALL, model=MODEL, stage=stage)
    arguments = {"job": job, "steps": SHORT_STEPS * steps}
    found = start_ranks("benchmarks.experiments.python_time:measure", arguments, job, runner)
    return (
        max(found["ranks"], key=lambda row: float(row["python_us"])) if "ranks" in found else found
    )


def python_section(by_stage: Rows) -> Section:
    def longest(row: Row) -> str:
        functions = list(row["functions_us"].items())[:4]
        return ", ".join(f"{where.rsplit(':', 1)[0]} {spent:.0f}" for where, spent in functions)

    columns = (
        Column("overhead, us", "overhead_us", ".0f"),
        Column("Python, us", "python_us", ".0f"),
        Column("most of it in", longest),
    )
    return Section(
        *("the engine itself, per unit and pass", by_stage, columns),
        caption="no compute, no communication; overhead: Python and torch's dispatch",
    )


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
