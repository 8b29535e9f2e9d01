"""What watches the steps of an engine: the interface, and what is told at the end of a step.

An engine owns a list of observers and calls each at the borders of forward, backward and step, in
the order of the list. Observers read; none changes a number of the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from zero_core.traffic import Traffic

__all__ = ["Observed", "Observer", "StepFacts", "StepObserver"]


@dataclass(frozen=True, slots=True)
class StepFacts:
    """A step that has just ended, the skipped ones included."""

    global_steps: int
    """Steps so far, this one included."""
    global_samples: int
    """Samples so far, over all ranks: what monitors count by."""
    lr: Sequence[float]
    """Learning rate of each parameter group, after the scheduler's step."""
    loss_scale: float | None
    """The loss scale after the step; None without fp16."""


class StepObserver(Protocol):
    """Called by the engine on every rank. An ``end_`` is called even if what it ends has failed."""

    def begin_forward(self) -> None:
        """Before a forward in training mode."""

    def end_forward(self) -> None:
        """After it."""

    def begin_backward(self) -> None:
        """Before the backward of a micro-step."""

    def end_backward(self) -> None:
        """After it."""

    def begin_plain_backward(self) -> None:
        """Within a backward that the script calls itself, at the first gradient of an output."""

    def end_plain_backward(self) -> None:
        """At its end, still within it; not called if it has failed."""

    def begin_step(self) -> None:
        """Before ``step`` of a micro-step, whether it updates or not."""

    def end_step(self) -> None:
        """After it."""

    def step_done(self, facts: StepFacts) -> None:
        """After ``end_step`` of a micro-step that ends a step."""


class Observer:
    """A `StepObserver` that does nothing: a base for those that need a few calls only."""

    def begin_forward(self) -> None:
        """Nothing."""

    def end_forward(self) -> None:
        """Nothing."""

    def begin_backward(self) -> None:
        """Nothing."""

    def end_backward(self) -> None:
        """Nothing."""

    def begin_plain_backward(self) -> None:
        """As of any other backward."""
        self.begin_backward()

    def end_plain_backward(self) -> None:
        """As of any other backward."""
        self.end_backward()

    def begin_step(self) -> None:
        """Nothing."""

    def end_step(self) -> None:
        """Nothing."""

    def step_done(self, facts: StepFacts) -> None:
        """Nothing."""


class Observed(Protocol):
    """What observers ask of an engine; `zero_core.Engine` has it."""

    @property
    def rank(self) -> int:
        """This rank."""

    def comm_report(self) -> tuple[Traffic, ...]:
        """What this rank sent in the last step."""
