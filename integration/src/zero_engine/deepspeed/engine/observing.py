"""Observers of the DeepSpeed engine's steps, as the configuration asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zero_core import ShardedModel
from zero_engine.deepspeed.config.reader import Settings
from zero_engine.monitoring import (
    CommunicationLog,
    FlopsProfiler,
    MemoryBreakdown,
    Monitor,
    Scalars,
    StepFacts,
    StepObserver,
    Throughput,
    ThroughputTimer,
    WallClock,
)

_Outputs = TypeVar("_Outputs")


class Watch:
    """Everything that watches an engine's steps.

    Attributes:
        monitor: where scalars go; ``engine.monitor``.
        observers: called in this order, that of DeepSpeed's output.
        tput_timer: counts steps and epochs; ``engine.tput_timer``.
    """

    def __init__(self, settings: Settings, engine: ShardedModel, batch_size: int) -> None:
        """Watch ``engine``, whose steps have ``batch_size`` samples.

        Raises:
            ConfigError: a monitor needs a library that is not installed.
        """
        self.monitor = Monitor(settings.monitors, rank=engine.rank)
        # Rank 0 prints. Times and bytes are taken on every rank, so that ranks stay alike.
        say: Callable[[str], None] = print if engine.rank == 0 else lambda text: None
        self.observers: list[StepObserver] = []
        if self.monitor.enabled:
            self.observers.append(Scalars(self.monitor))
        if settings.flops_profiler.enabled and engine.rank == 0:
            self.observers.append(FlopsProfiler(settings.flops_profiler, say=say))
        if settings.wall_clock_breakdown:
            self.observers.append(WallClock(engine.device, self.monitor, say=say))
        if settings.memory_breakdown:
            self.observers.append(MemoryBreakdown(engine.device, say=say))
        if settings.comms_logger.enabled:
            self.observers.append(CommunicationLog(engine, settings.comms_logger, say=say))
        if settings.throughput.enabled and settings.steps_per_print is not None:
            self.observers.append(Throughput(engine.device, settings.steps_per_print, say=say))
        self.tput_timer = ThroughputTimer(batch_size)
        self._is_in_backward = False

    @contextmanager
    def part(self, name: Literal["forward", "backward", "step"]) -> Iterator[None]:
        self._is_in_backward = name == "backward"
        for observer in self.observers:
            getattr(observer, f"begin_{name}")()
        try:
            yield
        finally:
            self._is_in_backward = False
            for observer in self.observers:
                getattr(observer, f"end_{name}")()

    def followed(self, outputs: _Outputs) -> _Outputs:
        """Return ``outputs`` of a forward, from which a plain ``backward()`` is observed, too."""
        self._is_in_backward = False  # one that failed has not told its end
        for leaf in pytree.tree_leaves(outputs) if self.observers else ():
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(self._enter_backward)  # type: ignore[no-untyped-call]
        return outputs

    def _enter_backward(self, _grad: Tensor) -> None:
        if self._is_in_backward:
            return
        self._is_in_backward = True
        for observer in self.observers:
            observer.begin_plain_backward()
        # Called back after all that was queued meanwhile: the engine waits for reductions there.
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(self._leave_backward))

    def _leave_backward(self) -> None:
        self._is_in_backward = False
        for observer in self.observers:
            observer.end_plain_backward()

    def step_done(self, facts: StepFacts) -> None:
        self.tput_timer.step_done(facts)
        for observer in self.observers:
            observer.step_done(facts)
