"""Rows, table and picture of the comparison.

[Note: figures]
step        median step time
comm        communication time: step less that of the bare forward and backward of the same run
to peer     comm of the faster peer, which sends 16 bits, over this one's: times as fast
sent        bytes that a node's end of the link has counted, per step; the busier direction
planned     what `zero_core.plan` says of the same; off: by how much the counters differ from it
link        sent over the rate of the link: what no communication over it can be faster than
cpu         processor seconds of all ranks together, per step
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

__all__ = ["BARS", "Found", "rows_of", "table_of", "write_plot"]

BITS, MEGA = 8, 1e6
BARS: Mapping[str, Any] = {
    "rate_mbit": 200,
    "ranks_per_node": 2,
    "to_peer": {"zero-3-all": 3.3, "zero-3-4bit": 4.5},
    "deviation": 0.02,
    "loss": 0.01,
}
"""What was asked for; `to_peer` at that rate and with so many ranks per node."""
HEADINGS = (
    *("contender", "step", "min", "comm", "to peer", ""),
    *("sent", "planned", "off", "", "link", "cpu", "loss"),
)


@dataclass(frozen=True)
class Found:
    """One contender at one rate over all rounds."""

    times_s: list[float] = field(default_factory=list)
    """Of every timed step, as rank 0 saw it."""
    cpu_s: float = 0.0
    """Processor seconds per step, of all ranks."""
    sent_bytes: list[float] = field(default_factory=list)
    """Per step, by node."""
    predicted_bytes: int | None = None
    """The same of either node, as planned."""
    counted_bytes: list[int | None] = field(default_factory=list)
    """The same of each node, as the contender counted it itself in the last step."""
    first_loss: float = float("nan")
    """Mean over ranks, of the first step at this rate."""
    last_loss: float = float("nan")
    failure: str = ""
    """Why there are no numbers."""


def rows_of(
    found: Mapping[str, Found], *, rate: int, bare: str, peers: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Every contender's figures, and what they are to others'; None where there is no other."""
    there = {name: one for name, one in found.items() if not one.failure}
    bare_s = statistics.median(there[bare].times_s) if bare in there else None
    comm = {
        name: None if bare_s is None or name == bare else statistics.median(one.times_s) - bare_s
        for name, one in there.items()
    }
    peer_s = min((s for name in peers if (s := comm.get(name)) is not None), default=None)
    exact = next((there[name].last_loss for name in (*peers, "zero-3") if name in there), None)
    rows: dict[str, dict[str, Any]] = {}
    for name, one in found.items():
        if one.failure:
            rows[name] = {"failure": one.failure}
            continue
        sent = max(one.sent_bytes)
        is_held = name != bare and exact is not None
        rows[name] = {
            "median_s": statistics.median(one.times_s),
            "min_s": min(one.times_s),
            "comm_s": comm[name],
            "to_peer": _ratio(peer_s, comm[name]),
            "sent_bytes": one.sent_bytes,
            "planned_bytes": one.predicted_bytes,
            "counted_bytes": one.counted_bytes,
            "deviation": _deviation(one),
            "link_s": sent * BITS / (rate * MEGA),
            "cpu_s": one.cpu_s,
            "first_loss": one.first_loss,
            "last_loss": one.last_loss,
            "is_loss_close": _is_close(one.last_loss, exact) if is_held else None,
            "times_s": one.times_s,
        }
    return rows


def _ratio(value: float | None, other: float | None) -> float | None:
    return value / other if value is not None and other is not None and other > 0 else None


def _deviation(one: Found) -> float | None:
    """Of the direction that differs more, relative to the plan; None without one."""
    planned = one.predicted_bytes
    if not planned:
        return None
    return max((sent / planned - 1 for sent in one.sent_bytes), key=abs)


def _is_close(loss: float, exact: float | None) -> bool:
    return exact is not None and abs(loss - exact) <= float(BARS["loss"]) * exact


def table_of(run: Mapping[str, Any]) -> Table:
    """One job at one rate; see [Note: figures]."""
    rate, ranks = run["rate_mbit"], run["ranks_per_node"]
    table = Table(
        title=f"{run['title']}, a link of {rate} Mbit/s between them",
        caption="ms; MB per direction; to peer: times as fast as the faster peer's communication; "
        f"bars: bytes within {BARS['deviation']:.0%} of the plan, losses within "
        f"{BARS['loss']:.0%} of the peer's",
    )
    for heading in HEADINGS:
        is_text = heading in ("contender", "")
        table.add_column(heading, justify="left" if is_text else "right", no_wrap=True)
    for name, row in run["contenders"].items():
        if "failure" in row:
            continue
        deviation, is_bad = row["deviation"], row["is_loss_close"] is False
        table.add_row(
            name,
            _ms(row["median_s"]),
            _ms(row["min_s"]),
            _ms(row["comm_s"]),
            "" if row["to_peer"] is None else f"{row['to_peer']:.2f}",
            verdict(name, row["to_peer"], rate=rate, ranks_per_node=ranks),
            f"{max(row['sent_bytes']) / MEGA:.2f}",
            "" if row["planned_bytes"] is None else f"{row['planned_bytes'] / MEGA:.2f}",
            "" if deviation is None else f"{deviation:+.1%}",
            "" if deviation is None else _word(abs(deviation) <= BARS["deviation"]),
            _ms(row["link_s"]),
            _ms(row["cpu_s"]),
            f"{row['last_loss']:.4f}{' differs' if is_bad else ''}",
        )
    return table


def verdict(name: str, to_peer: float | None, *, rate: int, ranks_per_node: int) -> str:
    """The bar of a contender and whether it is met; empty where there is none."""
    bar = BARS["to_peer"].get(name)
    is_there = (rate, ranks_per_node) == (BARS["rate_mbit"], BARS["ranks_per_node"])
    if bar is None or to_peer is None or not is_there:
        return ""
    return f"{bar:g} {_word(to_peer >= bar)}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.0f}"


def _word(is_met: bool) -> str:
    return "met" if is_met else "missed"


def write_plot(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Step time as compute, the link's share and the rest, a panel for each run."""
    figure = Figure(figsize=(10, 0.5 + 3.2 * len(runs)), layout="constrained")
    for axes, run in zip(figure.subplots(len(runs), 1, squeeze=False)[:, 0], runs, strict=True):
        rows = {name: row for name, row in run["contenders"].items() if "failure" not in row}
        steps = [row["median_s"] for row in rows.values()]
        links = [row["link_s"] for row in rows.values()]
        axes.barh(list(rows), steps, label="median step")
        axes.barh(list(rows), links, height=0.3, label="its bytes over the link's rate")
        bare_s = next((r["median_s"] for r in rows.values() if r["comm_s"] is None), None)
        if bare_s is not None:
            axes.axvline(bare_s, color="black", linewidth=0.8, label="bare forward and backward")
        axes.set_title(f"{run['title']}, {run['rate_mbit']} Mbit/s")
        axes.set_xlabel("seconds")
        axes.invert_yaxis()
        axes.legend(loc="lower right")
    figure.savefig(path, dpi=100)
