"""Tables and bars of rows that are steps of training: of most parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from rich.table import Table

from zero_engine.bench.gpu.part import Row

__all__ = ["draw_speeds", "steps_of", "table_of_steps"]


def steps_of(found: Mapping[str, Any]) -> dict[str, Row]:
    """The rows of a part that were measured, by name."""
    return {name: row for name, row in found["rows"].items() if "step_s" in row}


def table_of_steps(
    found: Mapping[str, Any],
    cells: Callable[[Row], Iterable[str]],
    headings: Sequence[str],
    *,
    title: str,
    caption: str,
) -> Table:
    """A line per row that was measured: its name, and ``cells`` of it under ``headings``."""
    table = Table(title=title, caption=caption)
    table.add_column("")
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, row in steps_of(found).items():
        table.add_row(name, *cells(row))
    return table


def draw_speeds(axes: Axes, found: Mapping[str, Any], ours: str) -> None:
    """Tokens per second as bars; green where ``ours`` is in the name."""
    rows = steps_of(found)
    colors = ["tab:green" if ours in name else "tab:gray" for name in rows]
    axes.barh(list(rows), [row["tokens_per_s"] for row in rows.values()], color=colors)
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second")
