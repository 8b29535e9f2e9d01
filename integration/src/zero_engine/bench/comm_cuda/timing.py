"""How long calls take on a device, without the host's part in it."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

__all__ = ["Stopwatch", "medians_s"]

_BUSY_WIDTH = 4096


class Stopwatch:
    """Times calls: by events on an accelerator, by the clock on a CPU.

    A call takes the host longer to start than a small kernel takes to run. So the device is first
    given other work, long enough for the host to start all the calls meanwhile: they then run back
    to back, and the time between the two events is theirs alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._busy: Tensor | None = None
        self._busy_s = 0.0
        if device.type != "cpu":
            self._busy = torch.zeros(_BUSY_WIDTH, _BUSY_WIDTH, dtype=torch.bfloat16, device=device)
            self._keep_busy(3)
            self._busy_s = self._between_events(lambda: self._keep_busy(10)) / 10

    def time_s(self, run: Callable[[], None], calls: int) -> float:
        """Seconds per call of ``run``; the first call must have been made before."""
        if self._device.type == "cpu":
            started_at = time.perf_counter()
            for _ in range(calls):
                run()
            return (time.perf_counter() - started_at) / calls
        torch.accelerator.synchronize(self._device)
        started_at = time.perf_counter()
        run()
        host_s = calls * (time.perf_counter() - started_at)
        torch.accelerator.synchronize(self._device)
        self._keep_busy(math.ceil(2 * host_s / self._busy_s))

        def run_all() -> None:
            for _ in range(calls):
                run()

        return self._between_events(run_all) / calls

    def _keep_busy(self, times: int) -> None:
        assert self._busy is not None
        for _ in range(times):
            torch.mm(self._busy, self._busy)

    def _between_events(self, run: Callable[[], None]) -> float:
        start, stop = (torch.Event(self._device.type, enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) / 1e3


def medians_s(
    contenders: Mapping[str, Callable[[], None]], stopwatch: Stopwatch, *, rounds: int, calls: int
) -> dict[str, float]:
    """Median seconds per call of each contender; in a round all take their turn."""
    for run in contenders.values():
        run()  # compiles, allocates
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            times[name].append(stopwatch.time_s(run, calls))
    return {name: statistics.median(found) for name, found in times.items()}
