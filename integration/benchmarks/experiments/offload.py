"""Optimizer states in host memory and in files: this engine and DeepSpeed's ZeRO-Offload. CPU.

[Note: figures]
overhead    median step time minus the median time of the bare forward and backward
to rival    a figure over that of DeepSpeed at the same stage with states in host memory
memory      peak resident memory of a rank minus its resident memory before the model was made
overlap     1 - waited / accessed: seconds in which forward or backward waited for an update, and
            seconds of file access
moved       MiB per rank and step between the compute device and the host: gradients, parameters
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.experiments.engine import Contenders, panels, races, report_of
from benchmarks.harness import options
from benchmarks.harness.job import Job
from benchmarks.harness.memory import MIB
from benchmarks.harness.options import RESULTS, Output, of
from benchmarks.harness.ranks import Row, Runner
from benchmarks.harness.report import MS, Column, Rows, Section, judged, publish
from benchmarks.harness.rounds import has_figures, measured, quotient, race_on_cpu

BARS = {"overhead_to_rival": 0.4, "memory_to_rival": 0.8, "overlap": 0.8, "loss": 1e-5}
"""Largest allowed values, and the least allowed overlap. ``loss`` bounds the relative difference
between contenders with fp32 states."""
ROUNDED = "int8"
"""Part of the name of each contender with rounded optimizer states. Its loss is not compared."""
_HOST = {"device": "cpu", "pin_memory": False}
_BLOCKS = {
    "offload": _HOST,
    "nvme": {"device": "nvme"},
    ROUNDED: {"device": "cpu", "state_dtype": ROUNDED},
    **{f"{percent}%": {**_HOST, "ratio": percent / 100} for percent in (0, 25, 50, 75)},
}
CONTENDERS: Contenders = {
    "bare": ("bare", 0, {}),
    **{
        f"{side}-{stage}-{name}": (side, stage, {"offload_optimizer": _BLOCKS[name]})
        for side, names in (("deepspeed", ("offload", "50%")), ("zero", _BLOCKS))
        for name in names
        for stage in (2, 3)
    },
}


def main(
    rounds: options.Rounds = 2,
    steps: options.Steps = 6,
    ranks: options.Ranks = None,
    size: options.Sizes = None,
    only: Annotated[list[str] | None, of(CONTENDERS)] = None,
    dtype: Annotated[str, typer.Option(help="fp32, or bf16 over fp32 master weights.")] = "fp32",
    nvme_path: Annotated[
        Path | None, typer.Option(help="Folder for states in files; the output's by default.")
    ] = None,
    output: Output = RESULTS,
) -> None:
    """Put the states of "nvme" contenders into ``nvme_path``, a folder on the disk to measure."""
    runner = Runner()
    nvme = (nvme_path or output).resolve()
    nvme.mkdir(parents=True, exist_ok=True)
    in_files = {"offload_optimizer": {"device": "nvme", "nvme_path": str(nvme)}}
    chosen = {name: CONTENDERS[name] for name in only or CONTENDERS}
    for name, (side, stage, _) in chosen.items():
        if name.endswith("nvme"):
            chosen[name] = side, stage, in_files
    found = []
    for jobs in races(chosen, size or ("6x512",), ranks or (2,), steps):
        rows = race_on_cpu([replace(job, dtype=dtype) for job in jobs], rounds, runner)
        found.append((jobs[0], compared(rows, jobs[0])))
    report = report_of(found, rounds=rounds, dtype=dtype, nvme_path=str(nvme), bars=BARS)
    sections = [section(job.title, rows) for job, rows in found]
    publish(output, "offload", report, sections, columns=2)


def compared(rows: Rows, job: Job) -> dict[str, Row]:
    """Add the figures of [Note: figures] to the rows. Without its reference a figure is None."""
    there = measured(rows)
    exact = [row["last_loss"] for name, row in there.items() if _is_exact(name)]

    def overhead(name: str) -> float | None:
        both = [there[n]["median_s"] for n in (name, "bare") if n in there]
        return both[0] - both[1] if len(both) == 2 else None

    found: dict[str, Row] = {}
    for name, row in rows.items():
        found[name] = row
        if not has_figures(row):
            continue
        rival = name.replace("zero", "deepspeed") if name.startswith("zero") else ""
        if rival and rival not in there:
            rival = f"deepspeed-{rival[10]}-offload"
        memory = there[rival]["added_mib_per_rank"] if rival in there else None
        io_s, stall_s = (row["counted"].get(key) for key in ("io_s", "stall_s"))
        blocked = quotient(stall_s, io_s)
        is_close = bool(exact) and math.isclose(row["last_loss"], exact[0], rel_tol=BARS["loss"])
        moved = (row["counted"][key] / len(row["times_s"]) for key in ("bytes_d2h", "bytes_h2d"))
        found[name] = row | {
            "moved_mib": [count / job.ranks / MIB for count in moved] if rival else None,
            "overhead_s": overhead(name),
            "overhead_to_rival": quotient(overhead(name), overhead(rival)),
            "memory_to_rival": quotient(row["added_mib_per_rank"], memory),
            "overlap": None if blocked is None else 1 - blocked,
            "is_loss_exact": is_close if _is_exact(name) else None,
        }
    return found


def _is_exact(name: str) -> bool:
    return name != "bare" and ROUNDED not in name


def section(title: str, rows: Rows) -> Section:
    def against(heading: str, key: str, spec: str = ".2f") -> Column:
        def cell(row: Row) -> str | None:
            value, bar = row[key], BARS[key]
            is_met = value is not None and (value >= bar if key == "overlap" else value <= bar)
            return judged(value, spec, is_met)

        return Column(heading, cell)

    def loss(row: Row) -> str:
        return f"{row['last_loss']:.6f}{' differs' if row['is_loss_exact'] is False else ''}"

    columns = (
        Column("step", "median_s", ".0f", MS),
        Column("min", "min_s", ".0f", MS),
        Column("overhead", "overhead_s", "+.0f", MS),
        against("to rival", "overhead_to_rival"),
        Column("memory", "added_mib_per_rank", ".0f"),
        against("to rival", "memory_to_rival"),
        against("overlap", "overlap", ".0%"),
        Column("moved", lambda row: " + ".join(f"{mib:.1f}" for mib in row["moved_mib"] or ())),
        Column("loss", loss),
    )
    overhead, memory, overlap, losses = BARS.values()
    caption = f"ms, MiB per rank; bars: overhead <= {overhead:g} and memory <= {memory:g} of "
    caption += f"DeepSpeed's, overlap with files >= {overlap:.0%}, losses within {losses:g}"
    named = f"optimizer state off the device: {title}"
    return Section(named, rows, columns, caption, "contender", panels(title, rows))
