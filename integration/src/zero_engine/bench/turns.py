"""Contenders in turns, round by round, each time in fresh processes."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

__all__ = ["take_turns"]

Row = dict[str, Any]
NEEDS: Mapping[str, str] = {"deepspeed": "deepspeed"}
"""What else has to be installed for a side."""


class Contender(Protocol):
    """What is measured."""

    @property
    def name(self) -> str:
        """Of its row."""

    @property
    def side(self) -> str:
        """Whose code it is."""


J = TypeVar("J", bound=Contender)


def take_turns(
    jobs: Sequence[J], rounds: int, run: Callable[[J], Row], say: Callable[[str], None]
) -> dict[str, Row]:
    """A row per contender: medians over its rounds, or why it has none.

    Args:
        jobs: who takes part, in this order in every round.
        rounds: how often everyone is measured.
        run: measures one, once; a row with ``step_s`` and ``tokens_per_s`` unless it failed.
        say: is given a line as each begins.
    """
    found: dict[str, list[Row]] = {job.name: [] for job in jobs}
    for number in range(rounds):
        for job in jobs:
            rows = found[job.name]
            if rows and "step_s" not in rows[-1]:
                continue  # it failed, or the time was over: it would again
            say(f"round {number + 1}/{rounds}: {job.name}")
            missing = _missing(job.side)
            rows.append({"failure": missing} if missing else run(job))
    return {name: _median(rows) for name, rows in found.items()}


def _missing(side: str) -> str:
    needed = NEEDS.get(side)
    if needed is None or importlib.util.find_spec(needed) is not None:
        return ""
    return f"{needed} is not installed: pip install {needed}"


def _median(rows: Sequence[Row]) -> Row:
    """The rounds of one contender as one row; all but its times are those of the first."""
    measured = [row for row in rows if "step_s" in row]
    if not measured:
        return rows[-1]
    times = [row["step_s"] for row in measured]
    speeds = [row["tokens_per_s"] for row in measured]
    medians = {"step_s": statistics.median(times), "tokens_per_s": statistics.median(speeds)}
    return {**measured[0], **medians, "steps_s": times}
