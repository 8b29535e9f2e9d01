"""``wall_clock_breakdown``, samples per second, and ``memory_breakdown``: the parts of a step.

On an accelerator times are those of events on the current stream, read at the end of a step: the
host waits for the device then, once a step, and only if times were asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partialmethod

import torch

from zero_engine.machine import used_bytes
from zero_engine.monitoring.monitors import Monitor, StepFacts, StepObserver

_GB = 1e9
_HOST = torch.device("cpu")
_NAMES: Mapping[str, str] = {"forward": "fwd", "backward": "bwd", "step": "step"}
"""What monitors call a part of a step, and what DeepSpeed's lines call it."""


class Stopwatch:
    """Adds up the time between `begin` and `end`, in milliseconds of the device's own clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: torch.Event | float | None = None
        self._pairs: list[tuple[torch.Event, torch.Event]] = []
        self._host_ms = 0.0
        self._was_used = False

    def begin(self) -> None:
        """Start the watch. An interval that was not ended is dropped."""
        self._begun = self._now()

    def end(self) -> None:
        begun, self._begun = self._begun, None
        self._was_used = True
        now = self._now()
        if isinstance(begun, float) and isinstance(now, float):
            self._host_ms += 1e3 * (now - begun)
        elif isinstance(begun, torch.Event) and isinstance(now, torch.Event):
            self._pairs.append((begun, now))

    def take(self) -> float | None:
        """Return the sum so far and reset it. None if nothing has ended since.

        On an accelerator, waits for the last event.
        """
        was_used, self._was_used = self._was_used, False
        if not was_used:
            return None
        total, self._host_ms = self._host_ms, 0.0
        pairs, self._pairs = self._pairs, []
        if pairs:
            pairs[-1][1].synchronize()  # the host waits for the stream that recorded it
        return total + sum(float(begun.elapsed_time(ended)) for begun, ended in pairs)

    def _now(self) -> torch.Event | float:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


class WallClock(StepObserver):
    """Times of every step, printed on rank 0 and monitored.

    A time is the sum over the micro-steps of a step. Reductions run beside backward, so backward
    has no parts of its own. What did not go through the engine is not measured, and no 0.
    """

    def __init__(
        self, device: torch.device, monitor: Monitor, *, say: Callable[[str], None]
    ) -> None:
        self._watches = {name: Stopwatch(device) for name in _NAMES}
        self._monitor = monitor
        self._say = say
        self.last_ms: Mapping[str, float] = {}
        """The last step's times by DeepSpeed's names."""

    def _begin(self, part: str) -> None:
        self._watches[part].begin()

    def _end(self, part: str) -> None:
        self._watches[part].end()

    begin_forward = partialmethod(_begin, "forward")
    end_forward = partialmethod(_end, "forward")
    begin_backward = partialmethod(_begin, "backward")
    end_backward = partialmethod(_end, "backward")
    begin_step = partialmethod(_begin, "step")
    end_step = partialmethod(_end, "step")

    def step_done(self, facts: StepFacts) -> None:
        taken = {name: watch.take() for name, watch in self._watches.items()}
        times = {name: ms for name, ms in taken.items() if ms is not None}
        self.last_ms = {_NAMES[name]: ms for name, ms in times.items()}
        if self._monitor.enabled:
            prefix, samples = "Train/Samples/elapsed_time_ms_", facts.global_samples
            self._monitor.write_events([(prefix + n, ms, samples) for n, ms in times.items()])
        told = dict.fromkeys(_NAMES.values(), "not measured")
        told |= {name: f"{ms:.2f}" for name, ms in self.last_ms.items()}
        self._say("time (ms)" + "".join(f" | {name}: {text}" for name, text in told.items()))


class Throughput(StepObserver):
    """Samples per second, printed every ``every`` steps over the steps since the last line."""

    def __init__(self, device: torch.device, every: int, *, say: Callable[[str], None]) -> None:
        self._device = device
        self._every = every
        self._say = say
        self._since: tuple[float, int] | None = None  # when, and samples then

    def step_done(self, facts: StepFacts) -> None:
        """Start the first interval after the first step, a warm-up. Later, print the rate."""
        if self._since is None:
            self._since = self._now(), facts.global_samples
        elif facts.global_steps % self._every == 0:
            begun, samples = self._since
            self._since = self._now(), facts.global_samples
            rate = (facts.global_samples - samples) / max(self._since[0] - begun, 1e-9)
            self._say(f"step {facts.global_steps}: {rate:.4g} samples/s")

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()


class ThroughputTimer:
    """``engine.tput_timer``: samples per second of the whole run, and a count of epochs.

    Attributes:
        epoch_count: calls of `update_epoch_count`.
        global_step_count: steps so far.
        batch_size: samples of a step, of all ranks.
    """

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.epoch_count = 0
        self.global_step_count = 0
        self._first: tuple[float, int] | None = None  # when the first step was over, and samples
        self._last = (0.0, 0)

    def update_epoch_count(self) -> None:
        self.epoch_count += 1

    def step_done(self, facts: StepFacts) -> None:
        """Note when the host is done with a step. The device is not waited for."""
        self.global_step_count = facts.global_steps
        self._last = time.perf_counter(), facts.global_samples
        self._first = self._first or self._last

    def avg_samples_per_sec(self) -> float:
        """Return the rate after the first step, a warm-up. Before two steps it is -inf."""
        begun, samples = self._first or self._last
        if self._last[1] == samples:
            return float("-inf")
        return (self._last[1] - samples) / max(self._last[0] - begun, 1e-9)


class MemoryBreakdown(StepObserver):
    """Printer of the memory that device and process hold after each part of a micro-step."""

    def __init__(self, device: torch.device, *, say: Callable[[str], None]) -> None:
        self._device = device
        self._say = say

    def _print(self, part: str) -> None:
        held = [f"host {used_bytes(_HOST) / _GB:.3f}"]
        if self._device.type != "cpu":
            now = torch.accelerator.memory_allocated(self._device)
            most = torch.accelerator.max_memory_allocated(self._device)
            held.insert(0, f"device {now / _GB:.3f} (peak {most / _GB:.3f})")
        self._say(f"memory after {part} (GB): {', '.join(held)}")

    end_forward = partialmethod(_print, "forward")
    end_backward = partialmethod(_print, "backward")
    end_step = partialmethod(_print, "step")
