"""What the DeepSpeed engine has watch its steps, as the configuration asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

import torch

from zero_engine.deepspeed.settings import Settings
from zero_engine.monitoring import (
    CommunicationLog,
    FlopsProfiler,
    MemoryBreakdown,
    Monitor,
    Observed,
    Scalars,
    StepFacts,
    StepObserver,
    Throughput,
    WallClock,
    make_monitor,
)

__all__ = ["Watch", "make_observers"]

_Part = Literal["forward", "backward", "step"]


class _Engine(Observed, Protocol):
    device: torch.device


class Watch:
    """Everything that watches an engine's steps.

    Attributes:
        monitor: where scalars go; ``engine.monitor``.
        observers: called in this order.
    """

    def __init__(self, settings: Settings, engine: _Engine) -> None:
        """Watch ``engine``, a `zero_core.Engine`.

        Raises:
            ConfigError: a monitor needs a library that is not installed.
        """
        self.monitor = make_monitor(settings.monitors, rank=engine.rank)
        self.observers = make_observers(settings, engine, self.monitor)

    @contextmanager
    def part(self, name: _Part) -> Iterator[None]:
        """Within, a part of a micro-step runs."""
        for observer in self.observers:
            getattr(observer, f"begin_{name}")()
        try:
            yield
        finally:
            for observer in self.observers:
                getattr(observer, f"end_{name}")()

    def step_done(self, facts: StepFacts) -> None:
        """A step has ended."""
        for observer in self.observers:
            observer.step_done(facts)

    @property
    def last_ms(self) -> dict[str, float]:
        """The last step's times in milliseconds; empty where they are not taken."""
        clocks = [one for one in self.observers if isinstance(one, WallClock)]
        return dict(clocks[0].last_ms) if clocks else {}


def make_observers(settings: Settings, engine: _Engine, monitor: Monitor) -> list[StepObserver]:
    """The observers of ``engine``, a `zero_core.Engine`, in the order in which DeepSpeed writes.

    Rank 0 prints. Times and bytes are taken on every rank, so that ranks stay alike.
    """
    say: Callable[[str], None] = print if engine.rank == 0 else _nothing
    found: list[StepObserver] = []
    if monitor.enabled:
        found.append(Scalars(monitor))
    if settings.flops_profiler.enabled and engine.rank == 0:
        found.append(FlopsProfiler(settings.flops_profiler, say=say))
    if settings.wall_clock_breakdown:
        found.append(WallClock(engine.device, monitor, say=say))
    if settings.memory_breakdown:
        found.append(MemoryBreakdown(engine.device, say=say))
    if settings.comms_logger.enabled:
        found.append(CommunicationLog(engine, settings.comms_logger, say=say))
    if settings.throughput.enabled and settings.steps_per_print is not None:
        found.append(Throughput(engine.device, settings.steps_per_print, say=say))
    return found


def _nothing(text: str) -> None:
    """Other ranks than 0 print nothing."""
