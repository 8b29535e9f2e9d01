"""Random numbers by micro-batch, for ``world_size_invariant``.

Dropout draws from torch's generators, whose state depends on what the rank has drawn before. So the
first forward of each micro-step seeds them from the seed, the step and the micro-batch's number in
the step: whichever rank computes a micro-batch, at whatever world size, draws the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zero_core._torch import is_in_backward, outside_graphs
from zero_core.comm.topology import Ranks
from zero_core.optim.train_state import TrainState


class MicroBatchSeeds:
    """Seeds torch's generators in the first training forward of each micro-step of an engine."""

    def __init__(self, model: nn.Module, train: TrainState, seed: int, ranks: Ranks) -> None:
        """Hook ``model``. ``train`` knows the step and the micro-step."""
        self._train = train
        self._seed = seed
        self._rank, self._world_size, self._device = ranks.rank, ranks.size, ranks.device
        self._seeded = (-1, -1)  # step and micro-step of the last seed
        self._handle = model.register_forward_pre_hook(outside_graphs(self._enter), prepend=True)

    def remove(self) -> None:
        self._handle.remove()

    def seed(self, micro_batch: int) -> None:
        """Seed for one micro-batch of the current step, by its number in the step."""
        text = f"{self._seed} {self._train.global_steps} {micro_batch}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little", signed=True)
        torch.default_generator.manual_seed(seed)
        if self._device.type != "cpu":
            torch.get_device_module(self._device).manual_seed(seed)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Seed nothing within: the caller does."""
        before, self._seeded = self._seeded, self._place
        try:
            yield
        finally:
            self._seeded = before

    @property
    def _place(self) -> tuple[int, int]:
        return self._train.global_steps, self._train.accumulation.count

    def _enter(self, module: nn.Module, args: Any) -> None:
        place = self._place
        if module.training and place != self._seeded and not is_in_backward():
            self._seeded = place
            self.seed(place[1] * self._world_size + self._rank)
