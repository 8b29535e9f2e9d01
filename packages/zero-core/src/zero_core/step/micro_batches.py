"""Loop over the micro-batches of a step for `zero_core.Engine.train_batch`.

[Note: random numbers by micro-batch]
Dropout draws from torch's generators. The vertical schedule interleaves the micro-batches of a
step. So each micro-batch has its own generator states, seeded from torch's seed and the number of
the micro-step since the start of training. The random numbers thus do not depend on the schedule.
Activation checkpointing restores the generator state at the start of a block to recompute it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor

from zero_core._torch import seed_generators
from zero_core.optim.train_state import TrainState
from zero_core.sharded.sharded_state import ShardedState


class ScaledLoss(Protocol):
    """Function that computes the loss of one micro-batch."""

    def __call__(self, batch: Any, /) -> tuple[Tensor, Tensor]:
        """Return the loss, and the result of `zero_core.Engine.scale` for it."""


class MicroBatches:
    """Driver that runs forward and backward of one micro-batch after another."""

    why_joint: ClassVar[str] = ""  # why a step's micro-batches cannot be computed one by one
    handles: Sequence[Any] = ()  # handles of hooks on modules

    def __init__(self, train: TrainState, state: ShardedState) -> None:
        self._train = train
        self._place = state.control.place
        self._device = state.device

    def run(self, batches: Sequence[Any], loss_of: ScaledLoss, *, seed: int) -> list[Tensor]:
        """Run all micro-batches of a step. Return their losses, detached.

        Does not end the last micro-step. ``seed``: torch's seed, from which the seeds of the
        micro-batches derive.
        """
        losses = []
        for number, batch in enumerate(batches):
            if number:
                self._train.end_micro_step()
            seed_generators(self._device, seed, self._train.micro_steps)
            loss, scaled = loss_of(batch)
            with self._place.during("backward"):
                scaled.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        return losses
