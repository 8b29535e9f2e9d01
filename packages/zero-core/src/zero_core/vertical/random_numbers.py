"""Random numbers by micro-batch, for `zero_core.Engine.train_batch`.

Dropout draws from torch's generators. With the vertical schedule the micro-batches of a step draw
in turns, so each has states of its own: it begins with a seed that follows from torch's seed and
the number of the micro-step since the training's start. So it draws the same numbers whatever the
schedule. Activation checkpointing keeps the state that a block began with, and repeats it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from zero_core._torch import seed_generators


class RandomStates:
    """States of torch's generators, on the CPU and on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def get(self) -> tuple[Tensor, ...]:
        """Return the states now: uint8, 1-D, on the CPU."""
        own = torch.get_rng_state()
        if self._device.type == "cpu":
            return (own,)
        return own, torch.get_device_module(self._device).get_rng_state(self._device)

    def set(self, states: tuple[Tensor, ...]) -> None:
        """Restore what `get` returned."""
        torch.set_rng_state(states[0])
        if self._device.type != "cpu":
            torch.get_device_module(self._device).set_rng_state(states[1], self._device)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore at the end of the context the states that it began with."""
        before = self.get()
        try:
            yield
        finally:
            self.set(before)

    def seed(self, base: int, micro_step: int) -> None:
        """Seed the generators for one micro-step. ``base``: torch's seed."""
        seed_generators(self._device, base, micro_step)
