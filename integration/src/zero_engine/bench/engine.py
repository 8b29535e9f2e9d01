"""Step time and peak memory of a training step, for this engine and its peers, in one run.

Every **round** runs every contender once, each in freshly started processes, one contender at a
time. So slow moments of the machine fall on all of them, and each one's memory is its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from zero_engine.bench.measured import Measured, missing, run_round
from zero_engine.bench.processes import CPU_ALONE, run_ranks
from zero_engine.bench.workload import Workload
from zero_engine.machine import processor_name

__all__ = ["compare"]

SHORT_STEPS = 10
"""Steps of what the engine's own Python is measured on for each of a workload's."""


def compare(
    workloads: Sequence[Workload],
    names: Sequence[str],
    *,
    rounds: int,
    stages: Sequence[int],
    output: Path,
) -> None:
    """Measure the contenders on each workload, and what the engine's own Python takes.

    Prints a table for each workload, and one for ``stages``; writes ``engine.json`` and
    ``engine.png``.
    """
    console = Console()
    output.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "rounds": rounds,
        "machine": {
            "processor": processor_name(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
        },
        "runs": [],
    }
    runs: list[tuple[Workload, list[Measured]]] = []
    for workload in workloads:
        results = {name: Measured(name, failure=missing(name)) for name in names}
        for number in range(rounds):
            for result in results.values():
                if not result.failure:
                    text = f"{workload.title}: round {number + 1}/{rounds}: {result.name}"
                    console.print(text, highlight=False)
                    run_round(workload, result)
        found = list(results.values())
        runs.append((workload, found))
        console.print(_table(workload, found))
        contenders = {result.name: result.summary() for result in found}
        report["runs"].append({"workload": asdict(workload), "contenders": contenders})
    report["python"] = {
        f"stage {stage}": _python_time(stage, workloads[0].steps) for stage in stages
    }
    console.print(_python_table(report["python"]))
    (output / "engine.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    _plot(runs, output / "engine.png")
    console.print(f"written to {output}", highlight=False)


def _python_time(stage: int, steps: int) -> dict[str, Any]:
    """The worst rank's figures; see `zero_engine.bench.python_time`, whose steps are short."""
    arguments = [str(stage), str(SHORT_STEPS * steps)]
    found = run_ranks("zero_engine.bench.python_time", arguments, 2, CPU_ALONE)
    return max(found, key=lambda row: row["python_us"])


def _python_table(by_stage: dict[str, Any]) -> Table:
    table = Table(
        title="the engine itself, per unit and pass",
        caption="no compute, no communication; overhead: Python and torch's dispatch",
    )
    for heading in ("", "overhead", "Python", "most of it in"):
        table.add_column(heading, justify="left" if heading in ("", "most of it in") else "right")
    for name, found in by_stage.items():
        functions = list(found["functions_us"].items())[:4]
        most = ", ".join(f"{where.rsplit(':', 1)[0]} {spent:.0f}" for where, spent in functions)
        overhead, python = found["overhead_us"], found["python_us"]
        table.add_row(name, f"{overhead:.0f} us", f"{python:.0f} us", most)
    return table


def _table(workload: Workload, results: Sequence[Measured]) -> Table:
    table = Table(
        title=f"one training step: {workload.title}",
        caption="medians; overhead: over the bare forward and backward; memory: peak per rank",
    )
    for heading in ("contender", "step", "min", "to DDP", "overhead", "to DDP's", "memory", "loss"):
        is_name = heading == "contender"
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=is_name)
    by_name = {result.name: result for result in results if not result.failure}
    bare, ddp = by_name.get("bare"), by_name.get("ddp")
    for result in results:
        if result.failure:
            table.add_row(result.name, result.failure)
            continue
        over = None if bare is None else result.median_s - bare.median_s
        over_ddp = None if bare is None or ddp is None else ddp.median_s - bare.median_s
        table.add_row(
            result.name,
            f"{result.median_s * 1e3:.0f} ms",
            f"{min(result.times_s) * 1e3:.0f} ms",
            "" if ddp is None else f"{result.median_s / ddp.median_s:.2f}",
            "" if over is None else f"{over * 1e3:+.0f} ms",
            f"{over / over_ddp:.2f}" if over and over_ddp else "",
            f"{result.added_mib:.0f} MiB",
            f"{result.last_loss:.6f}",
        )
    return table


def _plot(runs: Sequence[tuple[Workload, Sequence[Measured]]], path: Path) -> None:
    figure = Figure(figsize=(10, 0.5 + 3.5 * len(runs)), layout="constrained")
    axes = figure.subplots(len(runs), 2, squeeze=False)
    for (workload, results), (time_axes, memory_axes) in zip(runs, axes, strict=True):
        measured = [result for result in results if not result.failure]
        names = [result.name for result in measured]
        time_axes.barh(names, [result.median_s * 1e3 for result in measured])
        time_axes.set_xlabel("median step time (ms)")
        time_axes.set_title(workload.title)
        memory_axes.barh(names, [result.added_mib for result in measured], color="tab:orange")
        memory_axes.set_xlabel("peak memory per rank over the imports (MiB)")
        time_axes.invert_yaxis()
        memory_axes.invert_yaxis()
    figure.savefig(path, dpi=100)
