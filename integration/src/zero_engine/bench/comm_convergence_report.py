"""What the runs of `zero_engine.bench.comm_convergence` come to: a table, a summary, a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from zero_engine.bench.comm_training import CONTENDERS, DTYPES, PLAIN, Job, Run

__all__ = ["bar_percent", "plot", "summarize", "table"]

BAR_PERCENT, BAR_PERCENT_4_BIT = 1.0, 2.0


def bar_percent(contender: str) -> float:
    """How far its held-out loss may be from the unquantized one's, in percent.

    Twice as far with gradients of 4 bits and no error feedback.
    """
    flags = CONTENDERS[contender]
    is_rough = flags.get("zero_quantized_gradients") and "zeropp_loco_param" not in flags
    return BAR_PERCENT_4_BIT if is_rough else BAR_PERCENT


@dataclass(frozen=True)
class _Row:
    """One contender at one dtype: its runs, each with the unquantized run of the same seed."""

    contender: str
    dtype: str
    pairs: Sequence[tuple[Run, Run]]
    missing: Sequence[int]
    """Seeds that were asked for and of which this run, or the unquantized one, is not there."""

    @property
    def differences(self) -> list[float]:
        """Held-out loss against the unquantized one, in percent, seed by seed."""
        return [100.0 * (run.held_out / plain.held_out - 1.0) for run, plain in self.pairs]

    @property
    def worst(self) -> float:
        """The difference that is furthest from 0."""
        return max(self.differences, key=abs)

    @property
    def is_met(self) -> bool:
        """Whether every seed that was asked for is there, within the bar, and never NaN or Inf."""
        bar = bar_percent(self.contender)
        is_near = all(abs(difference) <= bar for difference in self.differences)
        return is_near and not self.missing and all(run.is_finite for run, _ in self.pairs)

    def ratio(self, kind: str) -> float:
        """How many times as much the unquantized run sends over one kind of link."""
        sent, before = (int(getattr(run, kind)) for run in self.pairs[0])
        return float(before / sent) if sent else math.inf

    def median(self, kind: str) -> float:
        """Median over the seeds of one figure."""
        return float(statistics.median(getattr(run, kind) for run, _ in self.pairs))


def _rows(runs: Sequence[Run], asked: Sequence[Job]) -> Iterator[_Row]:
    plain = {(run.dtype, run.seed): run for run in runs if run.contender == PLAIN}
    for dtype in DTYPES:
        for name in CONTENDERS:
            mine = [run for run in runs if (run.contender, run.dtype) == (name, dtype)]
            # One whose unquantized run failed has nothing to be held against.
            found = [(run, plain.get((dtype, run.seed))) for run in mine]
            pairs = [(run, other) for run, other in found if other is not None]
            seeds = {run.seed for run, _ in pairs}
            wanted = {job.seed for job in asked if (job.contender, job.dtype) == (name, dtype)}
            if pairs or wanted:
                yield _Row(name, dtype, pairs, sorted(wanted - seeds))


def summarize(runs: Sequence[Run], asked: Sequence[Job]) -> list[dict[str, Any]]:
    """The table's rows as plain builtins; a bar is met if every run that was asked for met it."""
    return [
        {
            "dtype": row.dtype,
            "contender": row.contender,
            "seeds": [run.seed for run, _ in row.pairs],
            "missing_seeds": list(row.missing),
            "is_met": row.is_met,
            **(_figures(row) if row.pairs else {}),
        }
        for row in _rows(runs, asked)
    ]


def _figures(row: _Row) -> dict[str, Any]:
    return {
        "held_out": row.median("held_out"),
        "training": row.median("training"),
        "to_plain_percent": row.differences,
        "median_percent": statistics.median(row.differences),
        "worst_percent": row.worst,
        "bar_percent": bar_percent(row.contender),
        "is_finite": all(run.is_finite for run, _ in row.pairs),
        "skipped_steps": [run.skipped_steps for run, _ in row.pairs],
        "within_node_ratio": row.ratio("within_node_bytes"),
        "between_nodes_ratio": row.ratio("between_nodes_bytes"),
    }


def table(runs: Sequence[Run], asked: Sequence[Job], unigram_nats: float) -> Table:
    """A row per dtype and contender."""
    found = Table(
        title="a small GPT on real text, quantized communication",
        caption=(
            "loss in nats per token, medians over seeds (guessing by frequency: "
            f"{unigram_nats:.2f}); less sent: how many times, within a node and between nodes"
        ),
    )
    for heading in ("dtype", "contender"):
        found.add_column(heading, no_wrap=True)
    for heading in ("held out", "training", "to plain", "worst", "bar", "", "less sent", "skipped"):
        found.add_column(heading, justify="right", no_wrap=True)
    last = None
    for row in _rows(runs, asked):
        if last not in (None, row.dtype):
            found.add_section()
        names = (row.dtype if row.dtype != last else "", row.contender)
        last = row.dtype
        if not row.pairs:
            found.add_row(*names, *[""] * 5, "missing")
            continue
        figures = [f"{row.median('held_out'):.4f}", f"{row.median('training'):.4f}"]
        found.add_row(
            *names,
            *figures,
            *([""] * 5 if row.contender == PLAIN else _verdict(row)),
            "/".join(str(run.skipped_steps) for run, _ in row.pairs),
        )
    return found


def _verdict(row: _Row) -> list[str]:
    has_nan = not all(run.is_finite for run, _ in row.pairs)
    return [
        f"{statistics.median(row.differences):+.2f}%",
        f"{row.worst:+.2f}%",
        f"{bar_percent(row.contender):g}%",
        "NaN" if has_nan else "met" if row.is_met else _why_not_met(row),
        f"{row.ratio('within_node_bytes'):.2f}, {row.ratio('between_nodes_bytes'):.2f}",
    ]


def _why_not_met(row: _Row) -> str:
    is_near = abs(row.worst) <= bar_percent(row.contender)
    return f"{len(row.missing)} missing" if is_near else "missed"


def plot(runs: Sequence[Run], path: Path, *, steps: int) -> None:
    """Training loss by step, means over seeds; below it, its distance to the unquantized run's."""
    rows = list(_rows(runs, ()))
    dtypes = [dtype for dtype in DTYPES if any(row.dtype == dtype for row in rows)]
    figure = Figure(figsize=(1.0 + 4.5 * len(dtypes), 7.5), layout="constrained")
    grid = figure.subplots(2, len(dtypes), squeeze=False, sharex=True, sharey="row")
    for dtype, losses, differences in zip(dtypes, *grid, strict=True):
        losses.set_title(dtype)
        for row in rows:
            if row.dtype == dtype:
                _draw(row, losses, differences, steps)
        for axes in (losses, differences):
            axes.grid(visible=True, alpha=0.3)
        differences.axhspan(-BAR_PERCENT, BAR_PERCENT, color="tab:gray", alpha=0.15)
        differences.set_xlabel("step")
    grid[0][0].set_ylabel("training loss (nats per token), mean over seeds")
    grid[1][0].set_ylabel("to unquantized (%), mean over seeds")
    grid[0][-1].legend()
    figure.savefig(path, dpi=120)


def _draw(row: _Row, losses: Axes, differences: Axes, steps: int) -> None:
    color = f"C{list(CONTENDERS).index(row.contender)}"
    curve = _mean([run.curve for run, _ in row.pairs])
    plain = _mean([plain.curve for _, plain in row.pairs])
    at = [steps * (place + 1) / len(curve) for place in range(len(curve))]
    losses.plot(at, curve, label=row.contender, color=color, linewidth=1)
    if row.contender != PLAIN:
        percent = [100.0 * (a / b - 1.0) for a, b in zip(curve, plain, strict=True)]
        differences.plot(at, percent, color=color, linewidth=1)


def _mean(curves: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(values) for values in zip(*curves, strict=True)]
