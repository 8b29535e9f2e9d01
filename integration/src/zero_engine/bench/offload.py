"""Optimizer state off the device: this engine beside DeepSpeed's ZeRO-Offload, in one run.

[Note: figures]
overhead    median step less the median bare forward and backward of the same run; and the same
            of the fastest steps, which other work on the machine disturbs least
to rival    a figure over that of DeepSpeed at the same stage with its states in host memory
memory      peak resident memory of a rank over what it was before the model
overlap     share of the seconds of file access that the step computed through: 1 less the seconds
            that forward or backward were blocked because an update was not done
hidden      share of them that does not show in the step: 1 less what the step takes longer than
            with states in host memory, over the seconds of file access in a step

Every **round** runs every contender once, in freshly started processes, one contender at a time.
DeepSpeed compiles its Adam in a run of its own before them.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from zero_engine.bench.measured import Measured, missing, run_round
from zero_engine.bench.offload_contenders import NEEDS, NVME_PATH, RIVALS
from zero_engine.bench.workload import Workload
from zero_engine.machine import processor_name

__all__ = ["compare"]

OVERHEAD_BAR, MEMORY_BAR, OVERLAP_BAR = 0.4, 0.8, 0.8
LOSS_BAR = 1e-5
"""How far apart, relatively, the last losses of contenders with fp32 states may be."""
ROUNDED = "int8"
"""In the name of a contender whose states are rounded, so that its loss is another."""
PAGE_WIDTH = 120
HEADINGS = (
    *("contender", "step", "min", "overhead", "to rival", "of min"),
    *("memory", "to rival", "overlap", "hidden", "loss"),
)
Rows = dict[str, dict[str, Any]]


def compare(
    workloads: Sequence[Workload],
    names: Sequence[str],
    *,
    rounds: int,
    nvme_path: Path,
    output: Path,
) -> None:
    """Measure the contenders on each workload; the tables, and who failed and why, come last.

    Writes ``offload.json`` and ``offload.png``. States in files are put below ``nvme_path``, which
    should lie on the disk that is meant, and removed again.
    """
    console = Console(width=None if sys.stdout.isatty() else PAGE_WIDTH)
    output.mkdir(parents=True, exist_ok=True)
    runs = []
    for workload in workloads:
        results = [Measured(name, failure=missing(name, NEEDS)) for name in names]
        _warm_up(workload, results, console)
        for number in range(rounds):
            for result in results:
                if not result.failure:
                    text = f"{workload.title}: round {number + 1}/{rounds}: {result.name}"
                    console.print(text, highlight=False)
                    _run(workload, result, nvme_path)
        runs.append((workload, _rows(results)))
    report = {
        "rounds": rounds,
        "nvme_path": str(nvme_path),
        "bars": {
            "overhead_to_rival": OVERHEAD_BAR,
            "memory_to_rival": MEMORY_BAR,
            "overlap": OVERLAP_BAR,
            "loss": LOSS_BAR,
        },
        "machine": {
            "processor": processor_name(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
        },
        "runs": [{"workload": asdict(w), "contenders": rows} for w, rows in runs],
    }
    (output / "offload.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    _plot(runs, output / "offload.png")
    console.print(f"written to {output}", highlight=False)
    for workload, rows in runs:
        console.print(_table(workload, rows))
        for name, row in rows.items():
            if "failure" in row:
                console.print(f"{name}: {row['failure']}", highlight=False, markup=False)


def _warm_up(workload: Workload, results: Sequence[Measured], console: Console) -> None:
    """Let contenders compile what they compile, each in one short run that is not counted."""
    tiny = replace(workload, layers=1, width=64, context=16, ranks=1, steps=1, warmup=0)
    for result in results:
        if result.name in NEEDS and not result.failure:
            console.print(f"{workload.title}: warm-up: {result.name}", highlight=False)
            tried = Measured(result.name)
            run_round(tiny, tried)
            result.failure = tried.failure


def _run(workload: Workload, result: Measured, nvme_path: Path) -> None:
    nvme_path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=nvme_path, prefix="nvme-") as folder:
        run_round(workload, result, {NVME_PATH: folder})


def _rows(results: Sequence[Measured]) -> Rows:
    """Every contender's figures, and what they are to others'; None where there is no other."""
    by_name = {result.name: result for result in results if not result.failure}
    bare = by_name.get("bare")
    exact = [r.last_loss for r in by_name.values() if r is not bare and ROUNDED not in r.name]
    rows: Rows = {}
    for result in results:
        row = rows[result.name] = result.summary()
        if result.failure:
            continue
        rival = by_name.get(RIVALS.get(result.name, ""))
        over, over_min = _overhead(result, bare)
        over_rival, over_rival_min = _overhead(rival, bare)
        row["overhead_s"] = over
        row["overhead_to_rival"] = _ratio(over, over_rival)
        row["min_overhead_to_rival"] = _ratio(over_min, over_rival_min)
        row["memory_to_rival"] = _ratio(
            result.added_mib, None if rival is None else rival.added_mib
        )
        row["overlap"] = _overlap(result.counted)
        row["hidden"] = _hidden(result, by_name.get(result.name.replace("nvme", "offload")))
        row["is_loss_exact"] = None
        if result is not bare and ROUNDED not in result.name:
            row["is_loss_exact"] = math.isclose(result.last_loss, exact[0], rel_tol=LOSS_BAR)
    return rows


def _overhead(result: Measured | None, bare: Measured | None) -> tuple[float | None, float | None]:
    """Of the median and of the fastest step, in seconds."""
    if result is None or bare is None:
        return None, None
    return result.median_s - bare.median_s, min(result.times_s) - min(bare.times_s)


def _ratio(value: float | None, other: float | None) -> float | None:
    return value / other if value is not None and other is not None and other > 0 else None


def _overlap(counted: Mapping[str, float]) -> float | None:
    """1 less the share of the file access that forward or backward waited for."""
    io_s = counted.get("io_s", 0.0)
    return 1 - counted["stall_s"] / io_s if io_s else None


def _hidden(result: Measured, in_memory: Measured | None) -> float | None:
    """The share of a step's file access that the step does not take longer for."""
    io_s = result.counted.get("io_s", 0.0)
    if not io_s or in_memory is None:
        return None
    num_ranks = len(result.added_bytes) / result.num_rounds
    per_step_s = io_s / num_ranks / len(result.times_s)
    return 1 - max(0.0, result.median_s - in_memory.median_s) / per_step_s


def _table(workload: Workload, rows: Rows) -> Table:
    table = Table(
        title=f"optimizer state off the device: {workload.title}",
        caption=f"ms, MiB per rank; bars: overhead <= {OVERHEAD_BAR:g} and memory <= "
        f"{MEMORY_BAR:g} of DeepSpeed's at the same stage, overlap with files >= "
        f"{OVERLAP_BAR:.0%}, losses within {LOSS_BAR:g}",
    )
    for heading in HEADINGS:
        is_name = heading == "contender"
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=True)
    for name, row in rows.items():
        if "failure" in row:
            continue
        over, overlap = row["overhead_s"], row["overlap"]
        is_loss_bad = row["is_loss_exact"] is False
        table.add_row(
            name,
            f"{row['median_s'] * 1e3:.0f}",
            f"{row['min_s'] * 1e3:.0f}",
            "" if over is None else f"{over * 1e3:+.0f}",
            _against(row["overhead_to_rival"], OVERHEAD_BAR),
            _number(row["min_overhead_to_rival"]),
            f"{row['added_mib_per_rank']:.0f}",
            _against(row["memory_to_rival"], MEMORY_BAR),
            "" if overlap is None else f"{_percent(overlap)} {_word(overlap >= OVERLAP_BAR)}",
            _percent(row["hidden"]),
            f"{row['last_loss']:.6f}{' differs' if is_loss_bad else ''}",
        )
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _against(value: float | None, bar: float) -> str:
    return "" if value is None else f"{_number(value)} {_word(value <= bar)}"


def _word(is_met: bool) -> str:
    return "met" if is_met else "missed"


def _plot(runs: Sequence[tuple[Workload, Rows]], path: Path) -> None:
    figure = Figure(figsize=(10, 0.5 + 3.5 * len(runs)), layout="constrained")
    axes = figure.subplots(len(runs), 2, squeeze=False)
    for (workload, rows), (time_axes, memory_axes) in zip(runs, axes, strict=True):
        shown = {name: row for name, row in rows.items() if "failure" not in row}
        colors = ["tab:green" if name in RIVALS else "tab:gray" for name in shown]
        times = [row["median_s"] * 1e3 for row in shown.values()]
        time_axes.barh(list(shown), times, color=colors)
        time_axes.set_xlabel("median step time (ms)")
        time_axes.set_title(workload.title)
        sizes = [row["added_mib_per_rank"] for row in shown.values()]
        memory_axes.barh(list(shown), sizes, color=colors)
        memory_axes.set_xlabel("peak memory per rank over the imports (MiB)")
        time_axes.invert_yaxis()
        memory_axes.invert_yaxis()
    figure.savefig(path, dpi=100)
