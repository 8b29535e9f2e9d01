"""Interface of observers of an engine's steps, and the facts of a finished step.

An engine owns a list of observers and calls each at the borders of forward, backward and step, in
the order of the list. Observers read; none changes a number of the training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from zero_core.comm.meter import Traffic


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
        """Called before a forward in training mode."""

    def end_forward(self) -> None:
        """Called when a forward in training mode has ended."""

    def begin_backward(self) -> None:
        """Called before the backward of a micro-step."""

    def end_backward(self) -> None:
        """Called when the backward of a micro-step has ended."""

    def begin_plain_backward(self) -> None:
        """Called within the script's own backward, at the first gradient of an output."""

    def end_plain_backward(self) -> None:
        """Called at the end of that backward, still within it, unless it has failed."""

    def begin_step(self) -> None:
        """Called before ``step`` of a micro-step, whether it updates or not."""

    def end_step(self) -> None:
        """Called when ``step`` of a micro-step has ended."""

    def step_done(self, facts: StepFacts) -> None:
        """Called after ``end_step`` of a micro-step that ends a step."""


class Observer:
    """A `StepObserver` that does nothing: a base of observers that need few of the calls."""

    def _ignore(self) -> None:
        pass

    begin_forward = end_forward = begin_backward = end_backward = begin_step = end_step = _ignore

    def step_done(self, facts: StepFacts) -> None:
        pass

    def begin_plain_backward(self) -> None:
        self.begin_backward()

    def end_plain_backward(self) -> None:
        self.end_backward()


class Observed(Protocol):
    """Members that observers read from an engine. `zero_core.Engine` has them."""

    @property
    def rank(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def comm_report(self) -> tuple[Traffic, ...]:
        """Return the traffic of this rank in the last step."""
