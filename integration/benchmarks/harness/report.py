"""Rows as tables, Markdown and pictures."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness.rounds import measured
from zero_engine.machine import processor_name

PAGE_WIDTH = 120
MS, US = 1e-3, 1e-6
Row = Mapping[str, Any]
Rows = Mapping[str, Row]
Axes = Any
"""matplotlib's. Rank processes, which import this, do without it."""


@dataclass(frozen=True)
class Column:
    """A column of a table of rows."""

    heading: str
    value: str | Callable[[Row], Any]
    """A key of the row, or a function of it. None is an empty cell; a bool "met" or "missed"."""
    spec: str = ""
    """A format specification."""
    unit: float = 1.0
    """A number is shown as a multiple of it."""

    def cell(self, row: Row) -> str:
        value = self.value(row) if callable(self.value) else row.get(self.value)
        if value is None:
            return ""
        if isinstance(value, bool):
            return word(value)
        if isinstance(value, str):
            return value
        return format(value if self.unit == 1.0 else value / self.unit, self.spec)


def word(is_met: bool | None) -> str:
    return {None: "", True: "met", False: "missed"}[is_met]


def table_of(
    rows: Rows, columns: Sequence[Column], *, title: str, caption: str, heading: str = ""
) -> Table:
    """Return a line per row with figures: its name under ``heading``, then its cells."""
    table = empty_table([heading, *(c.heading for c in columns)], title=title, caption=caption)
    for name, row in measured(rows).items():
        table.add_row(name, *(column.cell(row) for column in columns))
    return table


def empty_table(
    headings: Sequence[str], *, title: str, caption: str | None = None, num_names: int = 1
) -> Table:
    """Return a table whose first columns are names, and the others numbers."""
    table = Table(title=title, caption=caption)
    for number, heading in enumerate(headings):
        is_name = number < num_names
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=True)
    return table


def reasons(rows: Rows, prefix: str = "") -> Iterator[str]:
    """Yield a line for every row without figures."""
    for name, row in rows.items():
        for kind in ("failure", "skipped"):
            if kind in row:
                yield f"{prefix}{name}: {kind}: {row[kind]}"


def markdown(table: Table) -> str:
    """Return a table of text as Markdown's."""
    columns = [
        [str(c.header), "---:" if c.justify == "right" else "---", *map(str, c.cells)]
        for c in table.columns
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in zip(*columns, strict=True))


def make_console() -> Console:
    """Return a console that prints plain text, as wide as a page where there is no terminal."""
    width = None if sys.stdout.isatty() else PAGE_WIDTH
    return Console(width=width, highlight=False, markup=False)


def machine() -> dict[str, Any]:
    return {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }


def bars(
    axes: Axes,
    values: Mapping[str, float],
    label: str,
    *,
    ours: Callable[[str], bool] = lambda _: False,
    bar: float | None = None,
) -> None:
    """Draw a horizontal bar per name, ``ours`` in green, and a line at ``bar``."""
    colors = ["tab:green" if ours(name) else "tab:gray" for name in values]
    axes.barh(list(values), list(values.values()), color=colors)
    if bar is not None:
        axes.axvline(bar, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel(label)


def grouped_bars(axes: Axes, rows: Rows, keys: Sequence[str], label: str, unit: float) -> None:
    """Draw a bar per key beside each other for every row, as multiples of ``unit``."""
    height = 0.8 / len(keys)
    for number, key in enumerate(keys):
        places = [place + number * height for place in range(len(rows))]
        values = [(row[key] or 0.0) / unit for row in rows.values()]
        name = key.removesuffix("_s").removesuffix("_bytes").replace("_", " ")
        axes.barh(places, values, height=height, label=name)
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(rows))], list(rows))
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.legend()


def save_panels(
    path: Path, panels: Sequence[tuple[str, int, Callable[[Axes], None]]], *, columns: int = 1
) -> None:
    """Save a picture of panels, each with a title, a number of lines, and what draws it."""
    if not panels:
        return
    from matplotlib.figure import Figure

    rows = -(-len(panels) // columns)
    heights = [max(n for _, n, _ in panels[i * columns : (i + 1) * columns]) for i in range(rows)]
    size = (10 if columns == 1 else 6.5 * columns, 1 + 0.3 * sum(heights))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, height_ratios=heights)
    for axes, (title, _, draw) in zip(grid.flat, panels, strict=False):
        draw(axes)
        axes.set_title(title)
    for axes in list(grid.flat)[len(panels) :]:
        axes.remove()
    figure.savefig(path, dpi=100)


def save_times_and_memory(
    path: Path, runs: Iterable[tuple[str, Rows]], ours: Callable[[str], bool]
) -> None:
    """Save the median steps and the memory of contenders on the CPU, side by side for each run."""
    panels = []
    for title, rows in runs:
        shown = measured(rows)
        times = {name: row["median_s"] / MS for name, row in shown.items()}
        sizes = {name: row["added_mib_per_rank"] for name, row in shown.items()}
        for about, values, label in (
            (title, times, "median step time (ms)"),
            ("", sizes, "peak memory per rank over the imports (MiB)"),
        ):
            draw = lambda axes, v=values, t=label: bars(axes, v, t, ours=ours)  # noqa: E731
            panels.append((about, len(values) + 3, draw))
    save_panels(path, panels, columns=2)
