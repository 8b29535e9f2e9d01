"""Random numbers by micro-batch, for ``world_size_invariant``.

Dropout draws from torch's generators, whose state depends on what the rank has drawn before. So the
first forward of each micro-step seeds them from the seed, the step and the micro-batch's number in
the step: whichever rank computes a micro-batch, at whatever world size, draws the same numbers. So
does one that is repeated, as its forward raised or its gradients were dropped.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from zero_core._torch import is_in_backward, outside_graphs, seed_generators
from zero_core.comm.topology import Ranks
from zero_core.optim.train_state import TrainState


class MicroBatchSeeds:
    """Seeds torch's generators in the first training forward of each micro-step of an engine."""

    def __init__(self, model: nn.Module, train: TrainState, seed: int, ranks: Ranks) -> None:
        """Hook ``model``. ``train`` knows the step and the micro-step."""
        self._train = train
        self._seed = seed
        self._rank, self._world_size, self._device = ranks.rank, ranks.size, ranks.device
        self._seeded = (-1, -1, -1)  # `_place` of the last seed
        self._is_running = False  # also after a forward that raised
        self._handles = [
            model.register_forward_pre_hook(outside_graphs(self._enter), prepend=True),
            model.register_forward_hook(outside_graphs(self._leave)),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def seed(self, micro_batch: int) -> None:
        """Seed for one micro-batch of the current step, by its number in the step."""
        seed_generators(self._device, self._seed, self._train.global_steps, micro_batch)

    @property
    def _place(self) -> tuple[int, int, int]:
        train = self._train
        return train.global_steps, train.accumulation.count, train.num_drops

    def _enter(self, module: nn.Module, args: Any) -> None:
        if not module.training or is_in_backward():
            return
        place = self._place
        if place != self._seeded or self._is_running:
            self._seeded = place
            self.seed(place[1] * self._world_size + self._rank)
        self._is_running = True

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not is_in_backward():
            self._is_running = False
