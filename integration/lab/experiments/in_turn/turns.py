"""Two engines that train in turn: how much longer the steps of one take.

Which one is first changes with each turn, so that what happens beside them falls on both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

import zero_core
from benchmarks.harness.sides import engine_loop


class Taken(NamedTuple):
    """Seconds per step of a turn.

    Attributes:
        s: on the clock.
        cpu_s: processor time, user and system, of all of this process's threads.
    """

    s: float
    cpu_s: float


def train_in_turn(
    engines: Mapping[str, zero_core.Engine],
    batches: Iterator[Tensor],
    *,
    steps: int,
    turns: int,
    finish: Callable[[zero_core.Engine], None] = lambda engine: None,
) -> Iterator[tuple[str, Taken]]:
    """Train each engine for ``steps`` steps per turn. Yields its name and times after each.

    Every rank must exhaust it. ``finish`` waits for what an engine still does after its last step,
    and counts. There is one turn more than ``turns``, the first: it does not count.
    """
    for turn in range(turns + 1):
        for name in sorted(engines, reverse=bool(turn % 2)):
            step = engine_loop(engines[name])
            dist.barrier()
            began = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step(next(batches))
            finish(engines[name])
            taken = time.perf_counter() - began[0], time.process_time() - began[1]
            yield name, Taken(*(seconds / steps for seconds in taken))


def longer(plain: list[float], other: list[float]) -> tuple[float, float]:
    """Return the median of the turns' ratios less 1, and its standard error."""
    ratios = [b / a for a, b in zip(plain, other, strict=True)]
    lower, _, upper = statistics.quantiles(ratios, n=4)
    # A median's error is 1.253 standard deviations over the root; quartiles are 1.349 apart.
    return statistics.median(ratios) - 1, 1.253 * (upper - lower) / 1.349 / len(ratios) ** 0.5


def comparison(plain: list[Taken], other: list[Taken], name: str) -> dict[str, float]:
    """Return the medians of both, and what `longer` says of them, without the first turn.

    Keys are ``step_s``, ``{name}_s``, ``longer_s`` and ``error_s``, and those of processor time
    with ``cpu_s`` at their ends.
    """
    row: dict[str, float] = {}
    for index, kind in enumerate(Taken._fields):
        without, having = ([taken[index] for taken in side[1:]] for side in (plain, other))
        row[f"step_{kind}"], row[f"{name}_{kind}"] = map(statistics.median, (without, having))
        row[f"longer_{kind}"], row[f"error_{kind}"] = longer(without, having)
    return row
