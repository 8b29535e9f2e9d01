"""What was found, for the eye: a Markdown table and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from zero_engine.bench.comm_cuda.settings import BAR, BAR_NUMEL, MI

__all__ = ["markdown", "picture", "verdict"]

Row = Mapping[str, Any]
_HEADINGS = ("operation", "kind", "dtype", "elements", "µs", "GB/s", "of copy", "torch / it", "bar")


def markdown(rows: Sequence[Row]) -> str:
    """A table of all rows; an empty cell is what this device cannot tell."""
    lines = [_line(_HEADINGS), _line(["---"] * 3 + ["---:"] * 6)]
    lines += [_line(_cells(row)) for row in rows]
    return "\n".join(lines) + "\n"


def verdict(rows: Sequence[Row]) -> str:
    """One sentence on the bar."""
    judged = [row for row in rows if row["is_met"] is not None]
    if not judged:
        return (
            f"the bar, {BAR:.0%} of copy bandwidth, is for {BAR_NUMEL // MI} Mi elements and more"
        )
    num_met = sum(row["is_met"] for row in judged)
    worst = min(judged, key=lambda row: row["share"])
    return (
        f"{num_met} of {len(judged)} at {BAR:.0%} of copy bandwidth or more; the least is "
        f"{worst['share']:.0%}: {worst['operation']}, {worst['kind']}, {worst['dtype']}, "
        f"{_numel(worst['numel'])} elements"
    )


def picture(rows: Sequence[Row], path: Path) -> None:
    """Share of copy bandwidth over size; seconds where there is no share."""
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    figure = Figure(figsize=(5 * len(operations), 4), layout="constrained")
    all_axes = figure.subplots(1, len(operations), squeeze=False)[0]
    has_share = any(row["share"] is not None for row in rows)
    for axes, operation in zip(all_axes, operations, strict=True):
        for (kind, dtype), line in _lines(rows, operation).items():
            ys = [row["share"] if has_share else row["median_s"][row["backend"]] for row in line]
            style = "-" if dtype == "bf16" else "--"
            axes.plot(
                [row["numel"] for row in line], ys, style, marker="o", label=f"{kind} {dtype}"
            )
        if has_share:
            axes.axhline(BAR, color="black", linewidth=0.8)
            axes.set_ylim(bottom=0)
        axes.set_xscale("log", base=2)
        axes.set_title(operation)
        axes.set_xlabel("elements")
        axes.set_ylabel("share of copy bandwidth" if has_share else "seconds")
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=100)


def _lines(rows: Sequence[Row], operation: str) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["operation"] == operation:
            found.setdefault((row["kind"], row["dtype"]), []).append(row)
    return found


def _cells(row: Row) -> list[str]:
    share, times = row["share"], row["times_torch"]
    return [
        row["operation"],
        row["kind"],
        row["dtype"],
        _numel(row["numel"]),
        f"{row['median_s'][row['backend']] * 1e6:.1f}",
        "" if row["bytes_per_s"] is None else f"{row['bytes_per_s'] / 1e9:.0f}",
        "" if share is None else f"{share:.2f}",
        "" if times is None else f"{times:.1f}",
        {None: "", True: "met", False: "missed"}[row["is_met"]],
    ]


def _numel(numel: int) -> str:
    return f"{numel // MI} Mi" if numel % MI == 0 else f"{numel}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
