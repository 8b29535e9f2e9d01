"""What was found, for the eye: a short table per part, and one picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from zero_engine.bench.offload_cuda.settings import GIB

__all__ = ["draw_timeline", "picture", "show"]

Row = Mapping[str, Any]
Cells = Callable[[Row], Iterable[str]]


def show(parts: Mapping[str, Row], console: Console) -> None:
    """Print the tables; what ``"auto"`` chose; then a line for every row without figures."""
    for name, part in parts.items():
        headings, cells, caption = _TABLES[name]
        table = Table(title=name, caption=caption)
        table.add_column("")
        for heading in headings:
            table.add_column(heading, justify="right")
        for row_name, row in part["rows"].items():
            if "step_s" in row:
                table.add_row(row_name, *cells(row))
        if table.row_count:
            console.print(table)
    for name, part in parts.items():
        for row_name, row in part["rows"].items():
            chosen = row.get("ratio_report")
            if chosen is not None:
                text = f"{name}: {row_name}: settled on {chosen['ratio']:.3f}: {chosen['reason']}"
                console.print(text, highlight=False, markup=False)
            for kind in ("failure", "skipped"):
                if kind in row:
                    text = f"{name}: {row_name}: {kind}: {row[kind]}"
                    console.print(text, highlight=False, markup=False)


def _speed_cells(row: Row) -> Iterable[str]:
    share = row["host_share"]
    yield f"{row['tokens_per_s']:,.0f}"
    yield _ms(row["step_s"])
    yield "" if share is None else f"{share:.3f}"
    yield _gib(row["device_peak_bytes"])
    yield _gib(row["host_peak_bytes"])
    yield f"{row['losses'][-1]:.4f}"


def _timeline_cells(row: Row) -> Iterable[str]:
    yield _ms(row["step_s"])
    for key in ("device_busy_s", "device_idle_s", "bus_s", "host_s"):
        yield _ms(row[key])
    ratio = row["step_to_bound"]
    yield "" if ratio is None else f"{ratio:.2f} of {row['bound']}: {_word(row['is_met'])}"


def _capacity_cells(row: Row) -> Iterable[str]:
    yield f"{row['num_parameters'] / 1e9:.2f}"
    yield f"{row['step_s']:.2f}"
    yield _gib(row["device_peak_bytes"])
    yield _gib(row["device_limit_bytes"])
    yield _gib(row["host_peak_bytes"])
    yield f"{row['losses'][0]:.3f} to {row['losses'][-1]:.3f}"
    yield str(row["skipped_steps"])
    yield "" if row["is_met"] is None else _word(row["is_met"])


_TABLES: Mapping[str, tuple[tuple[str, ...], Cells, str]] = {
    "speed": (
        ("tokens/s", "step", "host's share", "device", "host", "loss"),
        _speed_cells,
        "medians; ms; peaks in GiB",
    ),
    "timeline": (
        ("step", "device busy", "idle", "bus", "host", "step to bound"),
        _timeline_cells,
        "ms; the goal is at most 1.15 of the largest of busy, bus and host",
    ),
    "capacity": (
        ("10^9", "s/step", "device", "limit", "host", "loss", "skipped", ""),
        _capacity_cells,
        "peaks in GiB; met: the loss fell, within the limits",
    ),
}


def picture(parts: Mapping[str, Row], path: Path) -> None:
    """Draw every part that has rows with figures."""
    measured = {
        name: {row_name: row for row_name, row in part["rows"].items() if "step_s" in row}
        for name, part in parts.items()
    }
    drawn = {name: rows for name, rows in measured.items() if rows}
    if not drawn:
        return
    heights = [len(rows) + 2 for rows in drawn.values()]
    figure = Figure(figsize=(9, 1 + 0.4 * sum(heights)), layout="constrained")
    axes = figure.subplots(len(drawn), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (name, rows) in zip(axes, drawn.items(), strict=True):
        _DRAWN[name](axis, rows)
        axis.invert_yaxis()
    figure.savefig(path, dpi=100)


def _draw_speed(axes: Axes, rows: Mapping[str, Row]) -> None:
    colors = ["tab:green" if name.startswith("ratio") else "tab:gray" for name in rows]
    axes.barh(list(rows), [row["tokens_per_s"] for row in rows.values()], color=colors)
    axes.set_xlabel("tokens per second")


def draw_timeline(axes: Axes, rows: Mapping[str, Row]) -> None:
    """Bars of a step and its bounds, ms, for each row."""
    parts = ("step_s", "device_busy_s", "bus_s", "host_s")
    height = 0.8 / len(parts)
    for number, part in enumerate(parts):
        places = [place + number * height for place in range(len(rows))]
        times = [(row[part] or 0.0) * 1e3 for row in rows.values()]
        axes.barh(places, times, height=height, label=part.removesuffix("_s").replace("_", " "))
    axes.set_yticks([place + 1.5 * height for place in range(len(rows))], list(rows))
    axes.set_xlabel("ms")
    axes.legend()


def _draw_capacity(axes: Axes, rows: Mapping[str, Row]) -> None:
    axes.barh(list(rows), [row["host_peak_bytes"] / GIB for row in rows.values()], label="host")
    device = [(row["device_peak_bytes"] or 0) / GIB for row in rows.values()]
    axes.barh(list(rows), device, height=0.4, label="device")
    axes.set_xlabel("peak memory (GiB)")
    axes.legend()


_DRAWN: Mapping[str, Callable[[Axes, Mapping[str, Row]], None]] = {
    "speed": _draw_speed,
    "timeline": draw_timeline,
    "capacity": _draw_capacity,
}


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"


def _gib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / GIB:.2f}"


def _word(is_met: bool) -> str:
    return "met" if is_met else "missed"
