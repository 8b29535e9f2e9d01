"""Rows, table and picture of the comparison over a link.

[Note: figures]
step        median step time
comm        communication time: step less that of the bare forward and backward of the same run
to peer     comm of the faster peer, which sends 16 bits, over this one's: times as fast
sent        bytes that a node's end of the link has counted, per step; the busier direction
planned     `zero_core.plan`'s figure for the same; off: by how much the counters differ from it
link        sent over the rate of the link: no communication over it can be faster
cpu         processor seconds of all ranks together, per step
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.harness.ranks import Row
from benchmarks.harness.report import MS, Axes, Column, save_panels, table_of, word
from benchmarks.harness.rounds import has_figures, measured, quotient

BITS, MEGA = 8, 1e6
BARE = "bare"
PEERS = ("fsdp2", "deepspeed-3")
BARS: Mapping[str, Any] = {
    "rate_mbit": 200,
    "ranks_per_node": 2,
    "to_peer": {"zero-3-all": 3.3, "zero-3-4bit": 4.5},
    "deviation": 0.02,
    "loss": 0.01,
}
"""The bars. `to_peer` at that rate and with so many ranks per node."""


def summed_up(
    rounds: Sequence[Row], place: int, ranks_per_node: int, planned_bytes: int | None
) -> Row:
    """Sum up a contender's rounds at one rate: bytes by node, means over ranks.

    Args:
        rounds: rows with ``ranks``: by rank, what was found at each rate.
        place: of the rate.
        ranks_per_node: of these ranks.
        planned_bytes: that a node sends per step.
    """
    if not has_figures(rounds[-1]):
        return rounds[-1]
    by_round = [[of_rank[place] for of_rank in row["ranks"]] for row in rounds]
    num_steps = sum(len(ranks[0]["times_s"]) for ranks in by_round)
    firsts = range(0, len(by_round[0]), ranks_per_node)
    counted = [
        [rank["counted_bytes"] for rank in by_round[-1][first : first + ranks_per_node]]
        for first in firsts
    ]
    return {
        "times_s": [seconds for ranks in by_round for seconds in ranks[0]["times_s"]],
        "cpu_s": sum(rank["cpu_s"] for ranks in by_round for rank in ranks) / num_steps,
        "sent_bytes": [
            sum(ranks[first]["sent_bytes"] for ranks in by_round) / num_steps for first in firsts
        ],
        "planned_bytes": planned_bytes,
        "counted_bytes": [None if None in of_node else sum(of_node) for of_node in counted],
        "first_loss": statistics.fmean(rank["losses"][0] for rank in by_round[0]),
        "last_loss": statistics.fmean(rank["losses"][-1] for rank in by_round[-1]),
    }


def rows_of(found: Mapping[str, Row], *, rate: int) -> dict[str, Row]:
    """Return the rows with [Note: figures], or None where there is nothing to compare with."""
    there = measured(found)
    medians = {name: statistics.median(row["times_s"]) for name, row in there.items()}
    bare_s = medians.get(BARE)
    comm = {
        name: None if bare_s is None or name == BARE else seconds - bare_s
        for name, seconds in medians.items()
    }
    peer_s = min((s for name in PEERS if (s := comm.get(name)) is not None), default=None)
    exact = next((there[name]["last_loss"] for name in (*PEERS, "zero-3") if name in there), None)
    rows = {}
    for name, row in found.items():
        rows[name] = row
        if not has_figures(row):
            continue
        is_close = exact is not None and abs(row["last_loss"] - exact) <= BARS["loss"] * exact
        rows[name] = {
            "median_s": medians[name],
            "min_s": min(row["times_s"]),
            "comm_s": comm[name],
            "to_peer": quotient(peer_s, comm[name]),
            **row,
            "deviation": _deviation(row),
            "link_s": max(row["sent_bytes"]) * BITS / (rate * MEGA),
            "is_loss_close": None if name == BARE or exact is None else is_close,
        }
    return rows


def _deviation(row: Row) -> float | None:
    """Return that of the direction that differs more, relative to the plan."""
    planned = row["planned_bytes"]
    return max((sent / planned - 1 for sent in row["sent_bytes"]), key=abs) if planned else None


def table(run: Mapping[str, Any]) -> Table:
    """Return the table of one size at one rate. See [Note: figures]."""
    rate, ranks = run["rate_mbit"], run["ranks_per_node"]
    rows = {name: {"name": name, **row} for name, row in run["contenders"].items()}
    columns = (
        Column("step", "median_s", ".0f", MS),
        Column("min", "min_s", ".0f", MS),
        Column("comm", "comm_s", ".0f", MS),
        Column("to peer", "to_peer", ".2f"),
        Column("", lambda r: verdict(r["name"], r["to_peer"], rate=rate, ranks_per_node=ranks)),
        Column("sent", lambda row: max(row["sent_bytes"]), ".2f", MEGA),
        Column("planned", "planned_bytes", ".2f", MEGA),
        Column("off", "deviation", "+.1%"),
        Column("", _is_as_planned),
        Column("link", "link_s", ".0f", MS),
        Column("cpu", "cpu_s", ".0f", MS),
        Column("loss", _loss),
    )
    return table_of(
        rows,
        columns,
        heading="contender",
        title=f"{run['title']}, a link of {rate} Mbit/s between them",
        caption="ms; MB per direction; to peer: times as fast as the faster peer's communication; "
        f"bars: bytes within {BARS['deviation']:.0%} of the plan, losses within "
        f"{BARS['loss']:.0%} of the peer's",
    )


def verdict(name: str, to_peer: float | None, *, rate: int, ranks_per_node: int) -> str:
    """Return the bar of a contender and whether it is met. Empty where there is none."""
    bar = BARS["to_peer"].get(name)
    is_there = (rate, ranks_per_node) == (BARS["rate_mbit"], BARS["ranks_per_node"])
    if bar is None or to_peer is None or not is_there:
        return ""
    return f"{bar:g} {word(to_peer >= bar)}"


def _is_as_planned(row: Mapping[str, Any]) -> bool | None:
    deviation = row["deviation"]
    return None if deviation is None else abs(deviation) <= BARS["deviation"]


def _loss(row: Mapping[str, Any]) -> str:
    return f"{row['last_loss']:.4f}{' differs' if row['is_loss_close'] is False else ''}"


def save_picture(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw step time as compute, the link's share and the rest, a panel for each run."""
    panels = []
    for run in runs:
        rows = measured(run["contenders"])
        title = f"{run['title']}, {run['rate_mbit']} Mbit/s"
        panels.append((title, len(rows) + 3, lambda axes, rows=rows: _draw(axes, rows)))
    save_panels(path, panels)


def _draw(axes: Axes, rows: Mapping[str, Row]) -> None:
    axes.barh(list(rows), [row["median_s"] for row in rows.values()], label="median step")
    links = [row["link_s"] for row in rows.values()]
    axes.barh(list(rows), links, height=0.3, label="its bytes over the link's rate")
    bare_s = next((r["median_s"] for r in rows.values() if r["comm_s"] is None), None)
    if bare_s is not None:
        axes.axvline(bare_s, color="black", linewidth=0.8, label="bare forward and backward")
    axes.set_xlabel("seconds")
    axes.invert_yaxis()
    axes.legend(loc="lower right")
