"""Learning rate and loss scale of each step, for the monitors."""

from __future__ import annotations

from zero_engine.monitoring.monitors import Event, Monitor
from zero_engine.monitoring.observer import Observer, StepFacts


class Scalars(Observer):
    """Writes ``Train/Samples/lr`` and, with fp16, ``Train/Samples/loss_scale``, as DeepSpeed."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def step_done(self, facts: StepFacts) -> None:
        events: list[Event] = [("Train/Samples/lr", facts.lr[0], facts.global_samples)]
        if facts.loss_scale is not None:
            events.append(("Train/Samples/loss_scale", facts.loss_scale, facts.global_samples))
        self._monitor.write_events(events)
