"""An offloaded step over the slowest of what it cannot do without.

As `zero_engine.bench.offload_cuda.timeline`, with the device's idle time held against its bar too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from rich.table import Table

from zero_engine.bench.gpu.part import Context, Part, Row
from zero_engine.bench.gpu.tables import steps_of, table_of_steps
from zero_engine.bench.offload_cuda.report import draw_timeline
from zero_engine.bench.offload_cuda.settings import DRY, REAL
from zero_engine.bench.offload_cuda.timeline import BOUND_GOAL, RATIOS, timeline

__all__ = ["PART", "with_idle"]

IDLE_BAR = 0.1
DRY_RATIOS = (0.6,)


def _run(context: Context) -> Row:
    settings = DRY if context.is_dry_run else replace(REAL, micro_batch=8)
    ratios = DRY_RATIOS if context.is_dry_run else RATIOS
    found = timeline(settings, context.runner, context.console, ratios, traces=context.traces)
    return {**found, "rows": {name: with_idle(row) for name, row in found["rows"].items()}}


def with_idle(row: Row) -> Row:
    """The row with ``idle_share`` of a step in which no kernel ran, and whether that is below 0.1.

    The device is idle of necessity where the host or the bus is the slowest: the bar is for rows
    that the device bounds, and for the ratio that was chosen automatically.
    """
    idle_s = row.get("device_idle_s")
    if idle_s is None:
        return row
    share = idle_s / row["step_s"]
    is_for_it = row["bound"] == "device" or row["ratio_report"] is not None
    return {
        **row,
        "idle_share": share,
        "idle_bar": IDLE_BAR,
        "is_idle_met": share < IDLE_BAR if is_for_it else None,
    }


def _table(found: Mapping[str, Any]) -> Table:
    return table_of_steps(
        found,
        _cells,
        ("step", "device", "bus", "host", "step to slowest", "idle"),
        title="a step and its bounds",
        caption=f"ms; bars: at most {BOUND_GOAL} of the slowest, idle below {IDLE_BAR:.0%}",
    )


def _cells(row: Row) -> Iterable[str]:
    for key in ("step_s", "device_busy_s", "bus_s", "host_s"):
        yield "" if row[key] is None else f"{row[key] * 1e3:.1f}"
    ratio = row["step_to_bound"]
    yield "" if ratio is None else f"{ratio:.2f} of {row['bound']}"
    yield f"{row['idle_share']:.1%}" if "idle_share" in row else ""


def _draw(axes: Axes, found: Mapping[str, Any]) -> None:
    draw_timeline(axes, steps_of(found))
    axes.invert_yaxis()


PART = Part(
    name="roofline",
    about="an offloaded step over the slowest of device, bus and host",
    share=5.0,
    run=_run,
    table=_table,
    draw=_draw,
)
