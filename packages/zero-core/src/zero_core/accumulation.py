"""How many micro-steps make a step, and where in one the training is.

A step has as many micro-steps as the configuration says, until a training loop says itself which
of them is the last: an epoch that does not divide ends with a shorter step.
"""

from __future__ import annotations

import logging

from torch import Tensor

from zero_core.errors import CheckpointError

__all__ = ["Accumulation"]

_log = logging.getLogger(__name__)


class Accumulation:
    """Counts micro-steps, and divides losses by their number.

    Attributes:
        steps: micro-steps per step, of the configuration.
        micro_steps: ended so far.
        count: of them, those of the step under way; 0 between two steps.
        override: whether the current micro-step is the last one of its step, as the training loop
            says; None: the count says.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.micro_steps = 0
        self.count = 0
        self.override: bool | None = None

    def check_ended(self, *, or_dropped: bool = False) -> None:
        """Refuse to save in the middle of a step, ``or_dropped``: unless its part is left out.

        Raises:
            CheckpointError: a step is under way.
        """
        if self.count and not or_dropped:
            raise CheckpointError(
                f"micro-step {self.micro_steps} is in the middle of an accumulation, of which "
                f"{self.count} are done: save after a step"
            )

    def set_steps(self, steps: int) -> None:
        """Have steps of ``steps`` micro-steps from now on.

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
        """A micro-step ends; at a boundary its step does, too."""
        self.count = 0 if self.is_boundary() else self.count + 1
        self.micro_steps += 1

    def restart(self, what: str) -> None:
        """The step under way, ``what`` in words, begins again, as its last backward did not end."""
        text = "%s starts again from its first micro-step, as the last backward did not end"
        _log.warning(text + " (%d micro-steps were done)", what, self.count)
        self.forget()

    def forget(self) -> None:
        """The gradients of the step under way were dropped: it begins again."""
        self.micro_steps -= self.count
        self.count = 0

    def resume(self, global_steps: int) -> None:
        """Go on after ``global_steps`` steps, counted in the configuration's micro-steps."""
        self.micro_steps, self.count = global_steps * self.steps, 0

    def divide(self, loss: Tensor, over: int | None) -> Tensor:
        """``loss`` over ``over`` micro-steps, None being the configuration's number.

        Raises:
            ValueError: ``over`` is below 1.
        """
        steps = self.steps if over is None else over
        if steps < 1:
            raise ValueError(f"over = {over}: expected a number of micro-steps, 1 or more")
        return loss / steps if steps > 1 else loss
