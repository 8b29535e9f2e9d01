"""Triton's kernels of the block quantizer against copy bandwidth.

What `python -m zero_engine.bench.comm_cuda` measures, in a process of its own and within the time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from matplotlib.axes import Axes
from rich.table import Table

from zero_engine.bench.comm_cuda.settings import BAR
from zero_engine.bench.gpu.part import Context, Part, Row

__all__ = ["PART"]

US = 1e6
MEASURING = 0.8
"""Share of the part's time in which a row may begin."""


def _run(context: Context) -> Row:
    """A row per operation, kind, dtype and size."""
    size = "dry" if context.is_dry_run else "real"
    # It stops by itself before it would be ended.
    deadline = time.time() + MEASURING * context.runner.clock.left_s()
    found = context.runner.start("zero_engine.bench.comm_cuda.rows", size, f"{deadline:.1f}")
    rows: dict[str, Row] = {_name(row): row for row in found.pop("rows", ())}
    if found.get("num_left"):
        rows["others"] = {"skipped": f"{found['num_left']} rows: the time was over"}
    rows |= {"all": found} if {"failure", "skipped"} & set(found) else {}
    return {"bar": BAR, "backend": found.get("backend"), "rows": rows}


def _name(row: Row) -> str:
    if "name" in row:
        return str(row["name"])
    return f"{row['operation']} {row['kind']} {row['dtype']} {row['numel']}"


def _table(found: Mapping[str, Any]) -> Table:
    """The largest size of each, which is what the bar is for."""
    rows = _measured(found)
    largest = max(row["numel"] for row in rows.values())
    table = Table(
        title=f"{found['backend']} kernels, {largest} elements",
        caption=f"bar: {found['bar']} of copy bandwidth",
    )
    table.add_column("")
    for heading in ("µs", "of copy", "torch / it"):
        table.add_column(heading, justify="right")
    for row in rows.values():
        if row["numel"] == largest:
            name = f"{row['operation']} {row['kind']} {row['dtype']}"
            table.add_row(name, *_cells(row))
    return table


def _measured(found: Mapping[str, Any]) -> dict[str, Row]:
    return {name: row for name, row in found["rows"].items() if "numel" in row}


def _cells(row: Row) -> Iterable[str]:
    yield f"{row['median_s'][row['backend']] * US:.1f}"
    for key in ("share", "times_torch"):
        yield "" if row[key] is None else f"{row[key]:.2f}"


def _draw(axes: Axes, found: Mapping[str, Any]) -> None:
    rows = _measured(found)
    largest = max(row["numel"] for row in rows.values())
    shown = {name: row for name, row in rows.items() if row["numel"] == largest}
    has_share = all(row["share"] is not None for row in shown.values())
    values = [
        row["share"] if has_share else row["median_s"][row["backend"]] * US
        for row in shown.values()
    ]
    axes.barh(list(shown), values)
    axes.invert_yaxis()
    axes.set_xlabel("share of copy bandwidth" if has_share else "µs")
    if has_share:
        axes.axvline(found["bar"], color="black", linewidth=0.8)


PART = Part(
    name="quantizers",
    about="Triton's quantizer kernels against copy bandwidth",
    share=3.0,
    run=_run,
    table=_table,
    draw=_draw,
)
