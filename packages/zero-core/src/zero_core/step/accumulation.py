"""Gradient accumulation: micro-steps of a step.

The configuration gives their number. A training loop may say itself which micro-step is the last
of its step: an epoch that does not divide ends with a shorter step.
"""

from __future__ import annotations

import logging

from torch import Tensor

from zero_core.errors import CheckpointError

_log = logging.getLogger(__name__)


class Accumulation:
    """Counter of micro-steps.

    Attributes:
        steps: micro-steps per step.
        micro_steps: micro-steps that have ended.
        count: those of the current step that have ended; 0 between two steps.
        override: whether the current micro-step is the last one of its step. None: the count
            decides.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.micro_steps = 0
        self.count = 0
        self.override: bool | None = None

    def check_ended(self, *, or_dropped: bool = False) -> None:
        """Refuse to save in the middle of a step, unless its part is ``or_dropped``.

        Raises:
            CheckpointError: a step is under way.
        """
        if self.count and not or_dropped:
            raise CheckpointError(
                f"micro-step {self.micro_steps} is in the middle of an accumulation, of which "
                f"{self.count} are done: save after a step"
            )

    def set_steps(self, steps: int) -> None:
        """Set the number of micro-steps per step.

        Raises:
            ValueError: it is below 1.
            RuntimeError: a step is under way.
        """
        if steps < 1:
            raise ValueError(f"gradient_accumulation_steps = {steps}: expected 1 or more")
        if self.count:
            raise RuntimeError(f"{self.count} micro-steps of a step are done: set it after step()")
        self.steps = steps

    def is_boundary(self) -> bool:
        """Whether the current micro-step is the last one of its step."""
        return self.count + 1 >= self.steps if self.override is None else self.override

    def end_micro_step(self) -> None:
        """Count a micro-step. At a boundary, start a new step."""
        self.count = 0 if self.is_boundary() else self.count + 1
        self.micro_steps += 1

    def restart(self, what: str) -> None:
        """Warn that the current step, described by ``what``, starts again, and `forget` it."""
        text = "%s starts again from its first micro-step, as the last backward did not end"
        _log.warning(text + " (%d micro-steps were done)", what, self.count)
        self.forget()

    def forget(self) -> None:
        """Start the current step again, as its gradients were dropped."""
        self.micro_steps -= self.count
        self.count = 0

    def resume(self, global_steps: int) -> None:
        """Continue after ``global_steps`` whole steps."""
        self.micro_steps, self.count = global_steps * self.steps, 0

    def divide(self, loss: Tensor, over: int | None) -> Tensor:
        """Divide ``loss`` by ``over`` micro-steps. None stands for `steps`.

        Raises:
            ValueError: ``over`` is below 1.
        """
        steps = self.steps if over is None else over
        if steps < 1:
            raise ValueError(f"over = {over}: expected a number of micro-steps, 1 or more")
        return loss / steps if steps > 1 else loss
