"""Two engines that train in turn, and the difference of their step times.

The engine that begins alternates, so that other work on the machine affects both engines.
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
    """Times per step of one turn.

    Attributes:
        s: wall-clock seconds.
        cpu_s: CPU seconds, user and system, of all threads of this process.
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
    """Train each engine for ``steps`` steps per turn. Yield its name and times after each turn.

    Every rank must exhaust the iterator. ``finish`` waits for an engine's remaining work, and its
    time counts. The first of ``turns + 1`` turns is for warming up.
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
    """Return the median of the turns' time ratios less 1, and its standard error."""
    ratios = [b / a for a, b in zip(plain, other, strict=True)]
    lower, _, upper = statistics.quantiles(ratios, n=4)
    # A median's standard error is 1.253 standard deviations over the square root of the count.
    # Quartiles are 1.349 standard deviations apart.
    return statistics.median(ratios) - 1, 1.253 * (upper - lower) / 1.349 / len(ratios) ** 0.5


def comparison(plain: list[Taken], other: list[Taken], name: str) -> dict[str, float]:
    """Return both engines' medians and the figures of `longer`, without the first turn.

    The keys of wall-clock times are ``step_s``, ``{name}_s``, ``longer_s`` and ``error_s``. The
    keys of CPU times end in ``cpu_s``.
    """
    row: dict[str, float] = {}
    for index, kind in enumerate(Taken._fields):
        without, having = ([taken[index] for taken in side[1:]] for side in (plain, other))
        row[f"step_{kind}"], row[f"{name}_{kind}"] = map(statistics.median, (without, having))
        row[f"longer_{kind}"], row[f"error_{kind}"] = longer(without, having)
    return row
