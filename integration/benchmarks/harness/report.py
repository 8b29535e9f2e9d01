"""Reports of an experiment: rows as JSON, tables and pictures.

[Note: report]
section  rows under one title, with the columns of their table and the panels of their picture
panel    one diagram of the picture: title, height in lines, and drawing function
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness.ranks import Row, write_json
from benchmarks.harness.rounds import measured
from zero_engine.machine import processor_name

PAGE_WIDTH = 120
MS, US = 1e-3, 1e-6
Rows = Mapping[str, Row]
Value = str | Callable[[Row], Any]
"""A key of a row, or a function of the row."""
Axes = Any
"""matplotlib's axes. Rank processes import this module without matplotlib."""
Panel = tuple[str, int, Callable[[Axes], None]]


@dataclass(frozen=True)
class Column:
    heading: str
    value: Value
    """None gives an empty cell, a bool "met" or "missed"."""
    spec: str = ""
    unit: float = 1.0
    """Divisor of a shown number."""

    def cell(self, row: Row) -> str:
        value = value_of(row, self.value)
        if value is None or isinstance(value, bool):
            return word(value)
        if isinstance(value, str):
            return value
        return format(value if self.unit == 1.0 else value / self.unit, self.spec)


def value_of(row: Row, value: Value) -> Any:
    return value(row) if callable(value) else row.get(value)


def word(is_met: bool | None) -> str:
    return {None: "", True: "met", False: "missed"}[is_met]


def judged(value: float | None, spec: str, is_met: bool | None) -> str | None:
    return None if value is None else f"{value:{spec}} {word(is_met)}".rstrip()


@dataclass(frozen=True)
class Section:
    """Rows under one title. See [Note: report]."""

    title: str
    rows: Rows
    columns: Sequence[Column]
    caption: str | None = None
    heading: str = ""
    """Heading of the column of row names."""
    panels: Sequence[Panel] = ()

    def show(self, prefix: str = "") -> None:
        """Print the table, then the reasons of missing rows."""
        if found := measured(self.rows):
            table = Table(title=self.title, caption=self.caption)
            table.add_column(self.heading, no_wrap=True)
            for column in self.columns:
                table.add_column(column.heading, justify="right", no_wrap=True)
            for name, row in found.items():
                table.add_row(name, *(column.cell(row) for column in self.columns))
            width = None if sys.stdout.isatty() else PAGE_WIDTH
            Console(width=width, highlight=False, markup=False).print(table)
        for name, row in self.rows.items():
            for kind in ("failure", "skipped"):
                if kind in row:
                    print(f"{prefix}{name}: {kind}: {row[kind]}")


def publish(
    output: Path, name: str, report: Row, sections: Sequence[Section], *, columns: int = 1
) -> None:
    write_report(output, name, report)
    save_panels(output / f"{name}.png", [p for s in sections for p in s.panels], columns=columns)
    print(f"written to {output}")
    for section in sections:
        section.show()


def write_report(output: Path, name: str, report: Row) -> None:
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / f"{name}.json", report)


def machine() -> Row:
    return {"processor": processor_name(), "cores": os.cpu_count(), "torch": torch.__version__}


def bars(
    title: str,
    rows: Rows,
    values: Mapping[str, Value],
    label: str,
    unit: float = 1.0,
    *,
    color: Callable[[str], str | None] = lambda _: None,
    bar: float | None = None,
) -> list[Panel]:
    """Return a panel with a horizontal bar per row and value, or [] if no row has figures.

    ``values`` are named in the legend. ``color`` maps a row's name to a color (None: matplotlib's
    default). ``bar`` is the position of a vertical line.
    """
    shown = measured(rows)
    height = 0.8 / len(values)

    def draw(axes: Axes) -> None:
        for number, (name, value) in enumerate(values.items()):
            places = [place + number * height for place in range(len(shown))]
            widths = [(value_of(row, value) or 0.0) / unit for row in shown.values()]
            colors = [color(row) or f"C{number}" for row in shown]
            axes.barh(places, widths, height=height, label=name, color=colors)
        axes.set_yticks([place + 0.4 - height / 2 for place in range(len(shown))], list(shown))
        if bar is not None:
            axes.axvline(bar, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.set_xlabel(label)
        if len(values) > 1:
            axes.legend()

    return [(title, len(shown) * len(values) + 3, draw)] if shown else []


def green(is_ours: Callable[[str], bool]) -> Callable[[str], str]:
    return lambda name: "tab:green" if is_ours(name) else "tab:gray"


def save_panels(path: Path, panels: Sequence[Panel], *, columns: int = 1) -> None:
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
