"""Micro-batches of a step: the driver of `zero_core.Engine.train_batch`, and its random numbers.

[Note: random numbers by micro-batch]
Dropout draws from torch's generators. With the vertical schedule the micro-batches of a step draw
in turns, so each has states of its own: it begins with a seed that follows from torch's seed and
the number of the micro-step since the training's start. So it draws the same numbers whatever the
schedule. Activation checkpointing keeps the state that a block began with, and repeats it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from zero_core._torch import seed_generators
from zero_core.optim.train_state import TrainState
from zero_core.sharded.sharded_state import ShardedState


class ScaledLoss(Protocol):
    """Computes the loss of one micro-batch."""

    def __call__(self, batch: Any, /) -> tuple[Tensor, Tensor]:
        """Return the loss, and the loss times the loss scale over the number of micro-batches."""


class MicroBatches:
    """Runs forward and backward of each micro-batch before the next one begins."""

    handles: Sequence[Any] = ()  # of hooks on modules

    def __init__(self, train: TrainState, state: ShardedState) -> None:
        self._train = train
        self._place = state.control.place
        self._device = state.device

    def check_apart(self, call: str) -> None:
        """Refuse ``call``, which serves one micro-batch alone, if a step needs all of them."""

    def run(self, batches: Sequence[Any], loss_of: ScaledLoss, *, seed: int) -> list[Tensor]:
        """Run all micro-batches of a step, and return their losses, without gradient.

        The step's last micro-step is under way then. ``seed``: torch's, from which those of the
        micro-batches follow.
        """
        losses = []
        for number, batch in enumerate(batches):
            if number:
                self._train.end_micro_step()
            seed_generators(self._device, seed, self._train.accumulation.micro_steps)
            loss, scaled = loss_of(batch)
            with self._place.during("backward"):
                scaled.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return losses
