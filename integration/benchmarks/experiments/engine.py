"""Step time and peak memory: bare model, DDP, FSDP2, DeepSpeed, and this engine.

Overhead is the step less the bare forward and backward of the same run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.experiments.python_time import SMALL
from benchmarks.harness.job import Job
from benchmarks.harness.options import (
    RESULTS,
    Context,
    MicroBatch,
    Output,
    Ranks,
    Rounds,
    Sizes,
    Steps,
    Threads,
    Warmup,
    choose,
    parse_size,
)
from benchmarks.harness.ranks import CPU_ALONE, Row, run_ranks, write_json
from benchmarks.harness.report import (
    MS,
    Column,
    empty_table,
    machine,
    make_console,
    reasons,
    save_times_and_memory,
    table_of,
)
from benchmarks.harness.rounds import measured, quotient, race_on_cpu

SHORT_STEPS = 10
"""Steps of `benchmarks.experiments.python_time` for each of a workload's."""
VOCAB, MODEL = 8192, "gpt2"
LR = 3e-4
HOST = {"offload_optimizer": {"device": "cpu", "ratio": 1.0}}
CONTENDERS: Mapping[str, tuple[str, int, Mapping[str, Any]]] = {
    "bare": ("bare", 0, {}),
    "ddp": ("ddp", 0, {}),
    "fsdp2": ("fsdp2", 3, {}),
    **{f"deepspeed-{stage}": ("deepspeed", stage, {}) for stage in (1, 2, 3)},
    **{f"zero-{stage}": ("zero", stage, {}) for stage in range(4)},
    "zero-3-offload": ("zero", 3, HOST),
}
"""Side, stage and further keys. ``zero-N`` is this engine at stage N."""


def main(
    rounds: Rounds = 2,
    steps: Steps = 6,
    warmup: Warmup = 2,
    ranks: Ranks = None,
    threads: Threads = 1,
    size: Sizes = None,
    context: Context = 128,
    micro_batch: MicroBatch = 2,
    only: Annotated[
        list[str] | None, typer.Option(help=f"Contenders, of: {', '.join(CONTENDERS)}.")
    ] = None,
    stage: Annotated[
        list[int] | None, typer.Option(help="Stages whose Python is profiled; 0 to 3.")
    ] = None,
    output: Output = RESULTS,
) -> None:
    """Measure, print a table per workload, write ``engine.json`` and ``engine.png``."""
    names = choose(only, CONTENDERS, "contender", "--only")
    common = {"steps": steps, "warmup": warmup, "threads": threads, "micro_batch": micro_batch}
    sizes, counts = size or ("6x512", "12x896"), ranks or (2, 4)
    runs = races({name: CONTENDERS[name] for name in names}, sizes, counts, context, common)
    console = make_console()
    found = []
    for jobs in runs:
        rows = race_on_cpu(jobs, rounds, console.print)
        found.append((jobs[0], rows))
        console.print(table(jobs[0].title, rows), *reasons(rows), sep="\n")
    stages = range(4) if stage is None else stage
    python = {f"stage {number}": python_time(number, steps) for number in stages}
    console.print(python_table(python))
    write_report(output, "engine", found, rounds=rounds, python=python)
    console.print(f"written to {output}")


def races(
    contenders: Mapping[str, tuple[str, int, Mapping[str, Any]]],
    sizes: Iterable[str],
    ranks: Iterable[int],
    context: int,
    common: Mapping[str, Any],
) -> list[list[Job]]:
    """Return the contenders' jobs in fp32, a list for each size and number of ranks."""
    shapes = [parse_size(size, vocab=VOCAB, context=context) for size in sizes]
    return [
        [
            Job(name, side, shape, model=MODEL, lr=LR, stage=s, zero=zero, ranks=count, **common)
            for name, (side, s, zero) in contenders.items()
        ]
        for shape in shapes
        for count in ranks
    ]


def write_report(
    output: Path, name: str, runs: Sequence[tuple[Job, dict[str, Row]]], **about: Any
) -> None:
    """Write the JSON and the picture of contenders on the CPU."""
    output.mkdir(parents=True, exist_ok=True)
    listed = [{"workload": job.workload, "contenders": rows} for job, rows in runs]
    write_json(output / f"{name}.json", {**about, "machine": machine(), "runs": listed})
    titled = [(job.title, rows) for job, rows in runs]
    save_times_and_memory(output / f"{name}.png", titled, lambda who: who.startswith("zero"))


def python_time(stage: int, steps: int) -> Row:
    """Return the worst rank's figures. See `benchmarks.experiments.python_time`."""
    job = replace(SMALL, model=MODEL, stage=stage)
    arguments = {"job": job, "steps": SHORT_STEPS * steps}
    found = run_ranks("benchmarks.experiments.python_time:measure", arguments, 2, CPU_ALONE)
    return max(found, key=lambda row: float(row["python_us"]))


def python_table(by_stage: Mapping[str, Row]) -> Table:
    table = empty_table(
        ("", "overhead", "Python", "most of it in"),
        title="the engine itself, per unit and pass",
        caption="no compute, no communication; overhead: Python and torch's dispatch",
    )
    for name, found in by_stage.items():
        functions = list(found["functions_us"].items())[:4]
        most = ", ".join(f"{where.rsplit(':', 1)[0]} {spent:.0f}" for where, spent in functions)
        table.add_row(name, f"{found['overhead_us']:.0f} us", f"{found['python_us']:.0f} us", most)
    return table


def table(title: str, rows: Mapping[str, Row]) -> Table:
    medians = {name: row["median_s"] for name, row in measured(rows).items()}
    bare, ddp = medians.get("bare"), medians.get("ddp")

    def over(row: Mapping[str, Any]) -> float | None:
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
    return table_of(
        rows, columns, title=f"one training step: {title}", caption=caption, heading="contender"
    )
