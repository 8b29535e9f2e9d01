"""Triton's kernels of the block quantizer against copy bandwidth.

The rows of `benchmarks.experiments.comm_cuda`, in a process of their own and within the time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from benchmarks.experiments.comm_cuda.kernels import BAR
from benchmarks.experiments.gpu.part import Context, Part
from benchmarks.harness.ranks import Row
from benchmarks.harness.report import US, Axes, Column, bars, table_of
from benchmarks.harness.rounds import measured

MEASURING = 0.8
"""Share of the part's time in which a row may begin."""
COLUMNS = (
    Column("µs", lambda row: row["median_s"][row["backend"]], ".1f", US),
    Column("of copy", "share", ".2f"),
    Column("torch / it", "times_torch", ".2f"),
)


def _run(context: Context) -> Row:
    """Return a row per operation, kind, dtype and size."""
    # It stops by itself before it would be ended.
    deadline = time.time() + MEASURING * context.runner.left_s()
    target = "benchmarks.experiments.comm_cuda.kernels:rows"
    size = "dry" if context.is_dry_run else "real"
    found = context.runner.start(target, size=size, deadline=deadline)
    rows: dict[str, Row] = {_name(row): row for row in found.pop("rows", ())}
    if found.get("num_left"):
        rows["others"] = {"skipped": f"{found['num_left']} rows: the time was over"}
    rows |= {"all": found} if {"failure", "skipped"} & set(found) else {}
    return {"bar": BAR, "backend": found.get("backend"), "rows": rows}


def _name(row: Row) -> str:
    if "name" in row:
        return str(row["name"])
    return f"{row['operation']} {row['kind']} {row['dtype']} {row['numel']}"


def _largest(found: Mapping[str, Any]) -> tuple[int, dict[str, Row]]:
    """Return the largest size, which the bar is for, and its rows."""
    rows = measured(found["rows"])
    largest = max(row["numel"] for row in rows.values())
    return largest, {_name(row): row for row in rows.values() if row["numel"] == largest}


def _table(found: Mapping[str, Any]) -> Table:
    largest, rows = _largest(found)
    title = f"{found['backend']} kernels, {largest} elements"
    short = {name.removesuffix(f" {largest}"): row for name, row in rows.items()}
    return table_of(short, COLUMNS, title=title, caption=f"bar: {found['bar']} of copy bandwidth")


def _draw(axes: Axes, found: Mapping[str, Any]) -> None:
    _, rows = _largest(found)
    if all(row["share"] is not None for row in rows.values()):
        shares = {name: row["share"] for name, row in rows.items()}
        bars(axes, shares, "share of copy bandwidth", bar=found["bar"])
        return
    times = {name: row["median_s"][row["backend"]] / US for name, row in rows.items()}
    bars(axes, times, "µs")


PART = Part(
    name="quantizers",
    about="Triton's quantizer kernels against copy bandwidth",
    share=3.0,
    run=_run,
    table=_table,
    draw=_draw,
)
