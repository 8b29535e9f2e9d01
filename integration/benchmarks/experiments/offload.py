"""Optimizer states in host memory and in files: this engine and DeepSpeed's ZeRO-Offload. CPU.

[Note: figures]
overhead    median step time minus the median time of the bare forward and backward. "of min" is the
            same for the fastest steps, which other work on the machine disturbs least
to rival    a figure over that of DeepSpeed at the same stage with states in host memory
memory      peak resident memory of a rank minus its resident memory before the model was made
overlap     1 - waited / accessed: seconds in which forward or backward waited for an update, and
            seconds of file access
hidden      1 - added / accessed: seconds that a step takes longer than with states in host memory,
            and seconds of file access in a step
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.experiments.engine import HOST, Contenders, panels, races, report_of
from benchmarks.harness import options
from benchmarks.harness.job import Job
from benchmarks.harness.options import RESULTS, Output, of
from benchmarks.harness.ranks import Row, Runner
from benchmarks.harness.report import MS, Column, Rows, Section, judged, publish
from benchmarks.harness.rounds import has_figures, measured, quotient, race_on_cpu

BARS = {"overhead_to_rival": 0.4, "memory_to_rival": 0.8, "overlap": 0.8, "loss": 1e-5}
"""Largest allowed values, and the least allowed overlap. ``loss`` bounds the relative difference
between contenders with fp32 states."""
ROUNDED = "int8"
"""Part of the name of each contender with rounded optimizer states. Its loss is not compared."""
_DEEPSPEED_HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
_INT8 = {"offload_optimizer": {"device": "cpu", "state_dtype": "int8"}}
CONTENDERS: Contenders = {
    "bare": ("bare", 0, {}),
    **{f"deepspeed-{s}-offload": ("deepspeed", s, _DEEPSPEED_HOST) for s in (2, 3)},
    **{f"zero-{s}-offload": ("zero", s, HOST) for s in (2, 3)},
    **{f"zero-{s}-nvme": ("zero", s, {"offload_optimizer": {"device": "nvme"}}) for s in (2, 3)},
    "zero-3-int8": ("zero", 3, _INT8),
}


def main(
    rounds: options.Rounds = 2,
    steps: options.Steps = 6,
    ranks: options.Ranks = None,
    size: options.Sizes = None,
    only: Annotated[list[str] | None, of(CONTENDERS)] = None,
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
        rows = race_on_cpu(jobs, rounds, runner)
        found.append((jobs[0], compared(rows, jobs[0])))
    report = report_of(found, rounds=rounds, nvme_path=str(nvme), bars=BARS)
    sections = [section(job.title, rows) for job, rows in found]
    publish(output, "offload", report, sections, columns=2)


def compared(rows: Rows, job: Job) -> dict[str, Row]:
    """Add the figures of [Note: figures] to the rows. Without its reference a figure is None."""
    there = measured(rows)
    exact = [row["last_loss"] for name, row in there.items() if _is_exact(name)]

    def overhead(name: str, key: str) -> float | None:
        both = [there[n][key] for n in (name, "bare") if n in there]
        return both[0] - both[1] if len(both) == 2 else None

    found: dict[str, Row] = {}
    for name, row in rows.items():
        found[name] = row
        if not has_figures(row):
            continue
        rival = f"deepspeed-{name[5]}-offload" if name.startswith("zero-") else ""
        memory = there[rival]["added_mib_per_rank"] if rival in there else None
        io_s, stall_s = (row["counted"].get(key) for key in ("io_s", "stall_s"))
        blocked = quotient(stall_s, io_s)
        in_memory = there.get(name.replace("nvme", "offload"))
        hidden = None
        if io_s and in_memory is not None:
            longer_s = max(0.0, row["median_s"] - in_memory["median_s"])
            hidden = 1 - longer_s / (io_s / job.ranks / len(row["times_s"]))
        is_close = _is_exact(name) and math.isclose(
            row["last_loss"], exact[0], rel_tol=BARS["loss"]
        )
        found[name] = row | {
            "overhead_s": overhead(name, "median_s"),
            "overhead_to_rival": quotient(overhead(name, "median_s"), overhead(rival, "median_s")),
            "min_overhead_to_rival": quotient(overhead(name, "min_s"), overhead(rival, "min_s")),
            "memory_to_rival": quotient(row["added_mib_per_rank"], memory),
            "overlap": None if blocked is None else 1 - blocked,
            "hidden": hidden,
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
        Column("of min", "min_overhead_to_rival", ".2f"),
        Column("memory", "added_mib_per_rank", ".0f"),
        against("to rival", "memory_to_rival"),
        against("overlap", "overlap", ".0%"),
        Column("hidden", "hidden", ".0%"),
        Column("loss", loss),
    )
    caption = (
        f"ms, MiB per rank; bars: overhead <= {BARS['overhead_to_rival']:g} and memory <= "
        f"{BARS['memory_to_rival']:g} of DeepSpeed's at the same stage, overlap with files >= "
        f"{BARS['overlap']:.0%}, losses within {BARS['loss']:g}"
    )
    named = f"optimizer state off the device: {title}"
    return Section(named, rows, columns, caption, "contender", panels(title, rows))
