"""Micro-batches of a step: the driver of `zero_core.Engine.train_batch`, and its random numbers.

[Note: random numbers by micro-batch]
Dropout draws from torch's generators. With the vertical schedule the micro-batches of a step draw
in turns, so each has states of its own: it begins with a seed that follows from torch's seed and
the number of the micro-step since the training's start. So it draws the same numbers whatever the
schedule. Activation checkpointing keeps the state that a block began with, and repeats it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from zero_core._torch import seed_generators
from zero_core.optim.train_state import TrainState
from zero_core.watch.place import Place


def random_states(device: torch.device) -> tuple[Tensor, ...]:
    """Return the states of torch's generators, on the CPU and on ``device``: uint8, on the CPU."""
    own = torch.get_rng_state()
    if device.type == "cpu":
        return (own,)
    return own, torch.get_device_module(device).get_rng_state(device)


def set_random_states(device: torch.device, states: tuple[Tensor, ...]) -> None:
    """Restore what `random_states` returned."""
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)


class ScaledLoss(Protocol):
    """Computes the loss of one micro-batch."""

    def __call__(self, batch: Any, /) -> tuple[Tensor, Tensor]:
        """Return the loss, and the loss times the loss scale over the number of micro-batches."""


class MicroBatches:
    """Runs forward and backward of each micro-batch before the next one begins."""

    handles: Sequence[Any] = ()  # of hooks on modules

    def __init__(self, train: TrainState, place: Place, device: torch.device) -> None:
        self._train = train
        self._place = place
        self._device = device

    def check_apart(self, call: str) -> None:
        """Refuse ``call``, which serves one micro-batch alone, if a step needs all of them."""

    def kept_random_states(self) -> AbstractContextManager[None]:
        """Return a context that ends with torch's random states as it began with."""
        kind = self._device.type
        devices = [] if kind == "cpu" else [self._device]
        return torch.random.fork_rng(devices, device_type=kind)

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
