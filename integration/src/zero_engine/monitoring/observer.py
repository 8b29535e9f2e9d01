"""Interface of observers of an engine's steps, and the facts of a finished step.

An engine owns a list of observers and calls each at the borders of forward, backward and step, in
the order of the list. Observers read; none changes a number of the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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


class StepObserver:
    """Called by the engine on every rank. An ``end_`` is called even if what it ends has failed."""

    def begin_forward(self) -> None:
        """Observe that a forward in training mode begins."""

    def end_forward(self) -> None:
        """Observe that it has ended."""

    def begin_backward(self) -> None:
        """Observe that the backward of a micro-step begins."""

    def end_backward(self) -> None:
        """Observe that it has ended."""

    def begin_plain_backward(self) -> None:
        """Observe the script's own backward, at the first gradient of an output."""
        self.begin_backward()

    def end_plain_backward(self) -> None:
        """Observe the end of that backward, still within it, unless it has failed."""
        self.end_backward()

    def begin_step(self) -> None:
        """Observe that ``step`` of a micro-step begins, whether it updates or not."""

    def end_step(self) -> None:
        """Observe that it has ended."""

    def step_done(self, facts: StepFacts) -> None:
        """Observe the end of a step, after ``end_step`` of its last micro-step."""
