"""States in host memory and in files: this engine and DeepSpeed's ZeRO-Offload, on the CPU.

[Note: figures]
overhead    median step less the median bare forward and backward of the same run; and the same
            of the fastest steps, which other work on the machine disturbs least
to rival    a figure over that of DeepSpeed at the same stage with its states in host memory
memory      peak resident memory of a rank over what it was before the model
overlap     share of the seconds of file access that the step computed through: 1 less the seconds
            that forward or backward were blocked because an update was not done
hidden      share of them that does not show in the step: 1 less what the step takes longer than
            with states in host memory, over the seconds of file access in a step

DeepSpeed compiles its Adam in a run of its own before the rounds.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.experiments.engine import HOST, races, write_report
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
)
from benchmarks.harness.ranks import Row
from benchmarks.harness.report import MS, Column, make_console, reasons, table_of, word
from benchmarks.harness.rounds import (
    Say,
    has_figures,
    measured,
    missing,
    quotient,
    race_on_cpu,
    run_on_cpu,
)
from benchmarks.harness.sides import NEEDS

OVERHEAD_BAR, MEMORY_BAR, OVERLAP_BAR = 0.4, 0.8, 0.8
LOSS_BAR = 1e-5
"""How far apart, relatively, the last losses of contenders with fp32 states may be."""
ROUNDED = "int8"
"""In the name of a contender whose states are rounded, so that its loss is another."""

_DEEPSPEED_HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
_INT8 = {"offload_optimizer": {"device": "cpu", "state_dtype": "int8"}}
_NVME = {"offload_optimizer": {"device": "nvme"}}
CONTENDERS: Mapping[str, tuple[str, int, Mapping[str, Any]]] = {
    "bare": ("bare", 0, {}),
    **{f"deepspeed-{s}-offload": ("deepspeed", s, _DEEPSPEED_HOST) for s in (2, 3)},
    **{f"zero-{s}-offload": ("zero", s, HOST) for s in (2, 3)},
    **{f"zero-{s}-nvme": ("zero", s, _NVME) for s in (2, 3)},
    "zero-3-int8": ("zero", 3, _INT8),
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
    nvme_path: Annotated[
        Path | None, typer.Option(help="Folder for states in files; the output's by default.")
    ] = None,
    output: Output = RESULTS,
) -> None:
    """Measure, write ``offload.json`` and ``offload.png``, print the tables last.

    States in files are put below ``nvme_path``, which should lie on the disk that is meant, and
    are removed again.
    """
    names = choose(only, CONTENDERS, "contender", "--only")
    common = {"steps": steps, "warmup": warmup, "threads": threads, "micro_batch": micro_batch}
    chosen = {name: CONTENDERS[name] for name in names}
    console = make_console()
    nvme = (nvme_path or output).resolve()
    nvme.mkdir(parents=True, exist_ok=True)

    def run(job: Job) -> Row:
        with tempfile.TemporaryDirectory(dir=nvme, prefix="nvme-") as folder:
            return run_on_cpu(_with_files(job, folder))

    found = []
    for jobs in races(chosen, size or ("6x512",), ranks or (2,), context, common):
        failures = _compile(jobs, console.print)
        able = [job for job in jobs if job.name not in failures]
        rows = failures | race_on_cpu(able, rounds, console.print, run)
        found.append((jobs[0], compared({name: rows[name] for name in names}, jobs[0])))
    bars = {
        "overhead_to_rival": OVERHEAD_BAR,
        "memory_to_rival": MEMORY_BAR,
        "overlap": OVERLAP_BAR,
        "loss": LOSS_BAR,
    }
    write_report(output, "offload", found, rounds=rounds, nvme_path=str(nvme), bars=bars)
    console.print(f"written to {output}")
    for job, rows in found:
        console.print(table(job.title, rows), *reasons(rows), sep="\n")


def _with_files(job: Job, folder: str) -> Job:
    block = job.zero.get("offload_optimizer", {})
    if block.get("device") != "nvme":
        return job
    return replace(job, zero={"offload_optimizer": {**block, "nvme_path": folder}})


def _compile(jobs: list[Job], say: Say) -> dict[str, Row]:
    """Run contenders that compile something once, shortly. Return the failures."""
    failures = {}
    for job in jobs:
        if job.side in NEEDS and not missing(job.side):
            say(f"{job.title}: warm-up: {job.name}")
            shape = replace(job.shape, layers=1, width=64, heads=1, context=16)
            row = run_on_cpu(replace(job, shape=shape, ranks=1, steps=1, warmup=0))
            if not has_figures(row):
                failures[job.name] = row
    return failures


def rival_of(name: str) -> str:
    """Return DeepSpeed's contender at the same stage, or an empty name."""
    return f"deepspeed-{name[5]}-offload" if name.startswith("zero-") else ""


def compared(rows: Mapping[str, Row], job: Job) -> dict[str, Row]:
    """Return the rows with [Note: figures], or None where there is nothing to compare with."""
    there = measured(rows)
    bare = there.get("bare")
    exact = [row["last_loss"] for name, row in there.items() if _is_exact(name)]
    found: dict[str, Row] = {}
    for name, row in rows.items():
        found[name] = dict(row)
        if not has_figures(row):
            continue
        rival = there.get(rival_of(name))
        in_memory = there.get(name.replace("nvme", "offload"))
        is_close = _is_exact(name) and math.isclose(row["last_loss"], exact[0], rel_tol=LOSS_BAR)
        memory = None if rival is None else rival["added_mib_per_rank"]
        found[name] |= {
            "overhead_s": _overhead(row, bare, "median_s"),
            "overhead_to_rival": _overhead_to(row, rival, bare, "median_s"),
            "min_overhead_to_rival": _overhead_to(row, rival, bare, "min_s"),
            "memory_to_rival": quotient(row["added_mib_per_rank"], memory),
            "overlap": _overlap(row),
            "hidden": _hidden(row, in_memory, job.ranks),
            "is_loss_exact": is_close if _is_exact(name) else None,
        }
    return found


def _is_exact(name: str) -> bool:
    return name != "bare" and ROUNDED not in name


def _overhead(row: Row | None, bare: Row | None, key: str) -> float | None:
    return None if row is None or bare is None else float(row[key] - bare[key])


def _overhead_to(row: Row, rival: Row | None, bare: Row | None, key: str) -> float | None:
    return quotient(_overhead(row, bare, key), _overhead(rival, bare, key))


def _overlap(row: Row) -> float | None:
    waited = quotient(row["counted"].get("stall_s"), row["counted"].get("io_s"))
    return None if waited is None else 1 - waited


def _hidden(row: Row, in_memory: Row | None, num_ranks: int) -> float | None:
    io_s = row["counted"].get("io_s", 0.0)
    if not io_s or in_memory is None:
        return None
    per_step_s = io_s / num_ranks / len(row["times_s"])
    longer_s = float(row["median_s"] - in_memory["median_s"])
    return 1 - max(0.0, longer_s) / float(per_step_s)


def table(title: str, rows: Mapping[str, Row]) -> Table:
    def against(key: str, bar: float) -> Column:
        return Column("to rival", lambda row: _judged(row[key], ".2f", bar))

    columns = (
        Column("step", "median_s", ".0f", MS),
        Column("min", "min_s", ".0f", MS),
        Column("overhead", "overhead_s", "+.0f", MS),
        against("overhead_to_rival", OVERHEAD_BAR),
        Column("of min", "min_overhead_to_rival", ".2f"),
        Column("memory", "added_mib_per_rank", ".0f"),
        against("memory_to_rival", MEMORY_BAR),
        Column("overlap", lambda row: _judged(row["overlap"], ".0%", OVERLAP_BAR, is_least=True)),
        Column("hidden", "hidden", ".0%"),
        Column("loss", _loss),
    )
    return table_of(
        rows,
        columns,
        heading="contender",
        title=f"optimizer state off the device: {title}",
        caption=f"ms, MiB per rank; bars: overhead <= {OVERHEAD_BAR:g} and memory <= "
        f"{MEMORY_BAR:g} of DeepSpeed's at the same stage, overlap with files >= "
        f"{OVERLAP_BAR:.0%}, losses within {LOSS_BAR:g}",
    )


def _judged(value: float | None, spec: str, bar: float, *, is_least: bool = False) -> str | None:
    if value is None:
        return None
    return f"{value:{spec}} {word(value >= bar if is_least else value <= bar)}"


def _loss(row: Mapping[str, Any]) -> str:
    return f"{row['last_loss']:.6f}{' differs' if row['is_loss_exact'] is False else ''}"
