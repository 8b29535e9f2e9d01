"""Is what the accelerator computes right: every group of cases in a fresh process.

[Note: groups]
engine        every stage against DDP (one rank: the bare model) with torch's fused AdamW, in fp16
              with its GradScaler
offload       the same with the optimizer's state on the host, at several ratios
comm          quantized collectives: the loss against that of the engine without; four ranks are
              two nodes, hpZ there changes no bit
delays        the same bits when everything that is enqueued, on any stream, is late at random
host_kernel   cpu-adam on the host against torch's fused AdamW on the device

Several ranks share one device, by a gloo group that serves it; where that does not work the row
says so. torch computes deterministically here: else the oracle would not repeat its own bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from rich.table import Table

from zero_engine.bench.gpu.part import Context, Part, Row

__all__ = ["GROUPS", "PART"]

GROUPS = (
    "engine 1",
    "offload 1",
    "delays",
    "host_kernel",
    "engine 2",
    "offload 2",
    "comm 2",
    "comm 4",
    "engine 3",
)
"""A number is that of the ranks. What needs no second rank comes first."""
DRY_GROUPS = ("engine 1", "offload 2", "delays", "host_kernel", "comm 4")


def _run(context: Context) -> Row:
    rows: dict[str, Row] = {}
    size = "dry" if context.is_dry_run else "real"
    for group in DRY_GROUPS if context.is_dry_run else GROUPS:
        context.console.print(group)
        found = context.runner.start("zero_engine.bench.gpu.correct.rank", group, size)
        for name, row in found.pop("rows", {}).items():
            rows[f"{group}: {name}"] = row
        if found:  # why there is no more
            rows[group] = found
    return {"rows": rows}


def _table(found: Mapping[str, Any]) -> Table:
    """A line per group; a line more for every case that misses its bar."""
    table = Table(title="correct", caption="the largest difference of a group's cases")
    for heading in ("", "cases", "met", "largest"):
        table.add_column(heading, justify="left" if not heading else "right")
    measured = {name: row for name, row in found["rows"].items() if "found" in row}
    for group in dict.fromkeys(name.partition(":")[0] for name in measured):
        rows = {n: row for n, row in measured.items() if n.partition(":")[0] == group}
        num_met = sum(row["is_met"] for row in rows.values())
        largest = max(row["found"] for row in rows.values())
        is_cut = {"failure", "skipped"} & set(found["rows"].get(group, {}))
        label = f"{group} (cut off)" if is_cut else group
        table.add_row(label, str(len(rows)), str(num_met), f"{largest:.2g}")
        for name, row in rows.items():
            if not row["is_met"]:
                table.add_row(f"  missed: {name}", "", f"bar {row['bar']:g}", f"{row['found']:.3g}")
    return table


def _draw(axes: Axes, found: Mapping[str, Any]) -> None:
    """How many cases of each group met their bar."""
    measured = {name: row for name, row in found["rows"].items() if "found" in row}
    groups = list(dict.fromkeys(name.partition(":")[0] for name in measured))
    for is_met, color in ((True, "tab:green"), (False, "tab:red")):
        counts = [
            sum(row["is_met"] is is_met for n, row in measured.items() if n.partition(":")[0] == g)
            for g in groups
        ]
        axes.scatter(counts, groups, color=color, label="met" if is_met else "missed")
    axes.invert_yaxis()
    axes.set_xlabel("cases")
    axes.legend()


PART = Part(
    name="correct",
    about="equivalence with DDP and torch's optimizers; the same bits under delays",
    share=8.0,
    run=_run,
    table=_table,
    draw=_draw,
)
