"""Observers of a step: times, samples per second, memory, operations, and bytes sent.

DeepSpeed's keys for them are ``wall_clock_breakdown``, ``memory_breakdown``, ``flops_profiler`` and
``comms_logger``. On an accelerator, `WallClock` records events on the current stream, and waits for
them at the end of each step.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from zero_core import ShardedModel
from zero_engine.machine import used_bytes
from zero_engine.monitoring.monitors import (
    CommsLoggerSettings,
    FlopsProfilerSettings,
    Monitor,
    StepFacts,
    StepObserver,
)

_GB = 1e9
_HOST = torch.device("cpu")
_ALL = "Global"
_logs: weakref.WeakSet[CommunicationLog] = weakref.WeakSet()
_NAMES: Mapping[str, str] = {"forward": "fwd", "backward": "bwd", "step": "step"}
"""DeepSpeed's short names of a step's parts, by the monitors' names."""


class WallClock(StepObserver):
    """Times of every step by the device's clock, printed on rank 0 and written to ``monitor``.

    A time is the sum over a step's micro-steps. Backward contains reductions, which run
    concurrently. A part that was not observed is "not measured".
    """

    def __init__(
        self, device: torch.device, monitor: Monitor, *, say: Callable[[str], None]
    ) -> None:
        self._device = device
        self._begun: dict[str, Any] = {}  # starts of parts that have not ended
        self._spans: dict[str, list[tuple[Any, Any]]] = {part: [] for part in _NAMES}
        self._monitor = monitor
        self._say = say
        self.last_ms: Mapping[str, float] = {}
        """The last step's times by DeepSpeed's names."""

    def _begin(self, part: str) -> None:
        self._begun[part] = self._now()

    def _end(self, part: str) -> None:
        now = self._now()
        self._spans[part].append((self._begun.pop(part, now), now))

    def _now(self) -> torch.Event | float:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    begin_forward = partialmethod(_begin, "forward")
    end_forward = partialmethod(_end, "forward")
    begin_backward = partialmethod(_begin, "backward")
    end_backward = partialmethod(_end, "backward")
    begin_step = partialmethod(_begin, "step")
    end_step = partialmethod(_end, "step")

    def step_done(self, facts: StepFacts) -> None:
        times: dict[str, float] = {}
        for part, spans in self._spans.items():
            for begun, ended in spans:
                if isinstance(ended, torch.Event):
                    ended.synchronize()
                    ms = begun.elapsed_time(ended)
                else:
                    ms = 1e3 * (ended - begun)
                times[part] = times.get(part, 0.0) + ms
            spans.clear()
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
        self._since: tuple[float, int] | None = None  # time and samples at the interval's start

    def step_done(self, facts: StepFacts) -> None:
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
    """``engine.tput_timer``: samples per second of the whole run, and a count of epochs."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.epoch_count = 0
        self.global_step_count = 0
        self._first: tuple[float, int] | None = None  # time and samples after the first step
        self._last = (0.0, 0)

    def update_epoch_count(self) -> None:
        self.epoch_count += 1

    def step_done(self, facts: StepFacts) -> None:
        self.global_step_count = facts.global_steps
        self._last = time.perf_counter(), facts.global_samples
        self._first = self._first or self._last

    def avg_samples_per_sec(self) -> float:
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


class FlopsProfiler(StepObserver):
    """Counter of this rank's operations in step ``profile_step``, by torch's `FlopCounterMode`.

    Counts matrix products, convolutions and attention. The count of forward is by module. The count
    of backward includes recomputation.
    """

    def __init__(self, settings: FlopsProfilerSettings, *, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._say = say
        self._step = 0
        self._counter: FlopCounterMode | None = None
        self.forward: dict[str, int] = defaultdict(int)  # operations by module
        self.backward = 0
        self._is_backward_counted = True

    def begin_forward(self) -> None:
        if self._step == self._settings.profile_step and self._counter is None:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()  # type: ignore[no-untyped-call]

    begin_backward = begin_forward

    def end_forward(self) -> None:
        for module, by_operator in self._end().items():
            self.forward[module] += sum(by_operator.values())

    def end_backward(self) -> None:
        self.backward += sum(self._end().get(_ALL, {}).values())

    def begin_plain_backward(self) -> None:
        """Record that this backward is not counted: a counter cannot start during a backward."""
        if self._step == self._settings.profile_step:
            self._is_backward_counted = False

    def end_plain_backward(self) -> None:
        pass

    def step_done(self, facts: StepFacts) -> None:
        if self._step == self._settings.profile_step:
            if self._settings.output_file is None:
                self._say(self.report())
            else:
                path = Path(self._settings.output_file)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(self.report() + "\n", encoding="utf-8")
        self._step = facts.global_steps

    def report(self) -> str:
        total = self.forward[_ALL]
        backward = (
            f"{self.backward:,}"
            if self._is_backward_counted
            else "not counted: call engine.backward(loss) in place of loss.backward()"
        )
        lines = [
            f"floating-point operations of step {self._settings.profile_step} on this rank",
            f"forward:  {total:,}",
            f"backward: {backward}",
        ]
        names = sorted(name for name in self.forward if name != _ALL)
        deepest = self._settings.module_depth
        kept = [name for name in names if deepest < 0 or name.count(".") <= deepest]
        for depth in sorted({name.count(".") for name in kept}):
            level = [name for name in kept if name.count(".") == depth]
            most = sorted(level, key=lambda name: -self.forward[name])
            top = ", ".join(self._row(n, total) for n in most[: self._settings.top_modules])
            lines.append(f"most at depth {depth}: {top}")
        if self._settings.detailed:
            lines += [f"  {self._row(name, total)}" for name in kept]
        return "\n".join(lines)

    def _row(self, name: str, total: int) -> str:
        return f"{name} {self.forward[name]:,} ({self.forward[name] / max(total, 1):.1%})"

    def _end(self) -> dict[str, dict[object, int]]:
        counter, self._counter = self._counter, None
        if counter is None:
            return {}
        counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return dict(counter.get_flop_counts())


class CommunicationLog(StepObserver):
    """Sums of `zero_core.Engine.comm_report` over steps. Collectives overlap, so none is timed."""

    def __init__(
        self, engine: ShardedModel, settings: CommsLoggerSettings, *, say: Callable[[str], None]
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._say = say
        self.steps = 0
        """Steps added up so far."""
        self._sums: dict[str, Counter[str]] = {}
        _logs.add(self)

    def step_done(self, facts: StepFacts) -> None:
        self.steps += 1
        for row in self._engine.comm_report():
            # DeepSpeed's names are longer: all_gather_into_tensor, reduce_scatter_tensor.
            is_named = any(name.startswith(row.collective) for name in self._settings.prof_ops)
            if not self._settings.prof_all and not is_named:
                continue
            name = f"{row.collective} ({row.content})" if self._settings.debug else row.collective
            calls, within, between = row.num_calls, row.within_node_bytes, row.between_nodes_bytes
            found = {"count": calls, "within_node_bytes": within, "between_nodes_bytes": between}
            self._sums.setdefault(name, Counter()).update(found)
            if self._settings.verbose:
                self._say(
                    f"comm op: {name} | step: {facts.global_steps} | calls: {calls} | "
                    f"bytes within node: {within} | bytes between nodes: {between}"
                )

    def summary(self) -> dict[str, dict[str, int]]:
        return {name: dict(sums) for name, sums in self._sums.items()}

    def print(self) -> None:
        lines = [
            f"{'Comm. Op': <34}{'Count': >12}{'Sent in node (B)': >20}{'Between nodes (B)': >20}"
        ]
        for name, row in self._sums.items():
            count, within, between = row.values()
            lines.append(f"{name: <34}{count: >12}{within: >20}{between: >20}")
        self._say("\n".join([*lines, f"{self.steps} steps, rank {self._engine.rank}"]))


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print the bytes sent so far, on rank 0 (``deepspeed.comm.log_summary``).

    With ``return_dict`` it also returns the numbers, on every rank.

    Raises:
        ValueError: ``show_straggler`` is true, or no engine logs its communication.
    """
    if show_straggler:
        raise ValueError(
            "log_summary(show_straggler=True) is not served: collectives run beside compute and "
            "are not timed; leave it out"
        )
    logs = list(_logs)
    if not logs:
        raise ValueError(
            "nothing was logged: set comms_logger.enabled to true in the configuration"
        )
    for log in logs:
        log.print()
    summary = {name: row for log in logs for name, row in log.summary().items()}
    return {"summary": summary} if return_dict else None
