"""Seconds of calls, while all ranks of the machine time the same."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

BUDGET_S = 0.03
"""Seconds that a point of a curve is repeated for, at least `LEAST` times."""
LEAST, TOGETHER, STEPS = 3, 12, 9
"""Least number of times, that of exchanges, and that of whole steps."""

Points = list[tuple[float, float]]


def rising(points: Points) -> Points:
    """Return points in which no smaller amount takes longer than a larger one."""
    found = points[-1:]
    for amount, seconds in reversed(points[:-1]):
        found.insert(0, (amount, min(seconds, found[0][1])))
    return found


@dataclass
class Stopwatch:
    """Times calls on one rank.

    Attributes:
        device: where the calls compute.
        curves: what was timed, by the names of `zero_engine.planning.rates`.
    """

    device: torch.device
    curves: dict[str, Points] = field(default_factory=dict)

    def seconds(self, call: Callable[[], object], *, is_together: bool = False) -> float:
        """Return the seconds of a call, once it has run before: the lower quartile of several.

        Other programs only add to the time. All ranks begin together. With ``is_together`` a call
        is an exchange of all ranks, so that all of them make equally many.
        """
        times = self._times(call, TOGETHER if is_together else LEAST, is_together)
        return sorted(times)[len(times) // 4]

    def typical_seconds(self, call: Callable[[], object], *, is_together: bool = False) -> float:
        """Return the median seconds of a call, as a training step has it: other programs included.

        For passes and steps of whole models, to which the kernels' own seconds are fitted.
        """
        return statistics.median(self._times(call, STEPS, is_together))

    def _times(self, call: Callable[[], object], least: int, is_together: bool) -> list[float]:
        call()
        if dist.is_initialized():
            dist.barrier()
        times: list[float] = []
        started_at = time.perf_counter()
        while len(times) < least or (
            not is_together and time.perf_counter() - started_at < BUDGET_S
        ):
            times.append(self._once(call))
        return times

    def curve(
        self, name: str, points: Iterable[tuple[float, Callable[[], object]]], **how: bool
    ) -> None:
        """Time calls by rising amount."""
        self.curves[name] = rising([(n, self.seconds(call, **how)) for n, call in points])

    def _once(self, call: Callable[[], object]) -> float:
        """Return the seconds of a call. An accelerator runs several in a row, which share them."""
        if self.device.type == "cpu":
            started_at = time.perf_counter()
            call()
            return time.perf_counter() - started_at
        number = 5
        torch.accelerator.synchronize(self.device)
        started_at = time.perf_counter()
        for _ in range(number):
            call()
        torch.accelerator.synchronize(self.device)
        return (time.perf_counter() - started_at) / number
