"""Random numbers of ``world_size_invariant``, and checks beside the sums of `SequentialGrads`.

[Note: random numbers that follow the micro-batch]
Dropout draws from torch's generators, whose state depends on what the rank has drawn before. So the
first forward of each micro-step seeds them from the seed, the step and the micro-batch's number in
the step: whichever rank computes a micro-batch, at whatever world size, draws the same numbers. So
does one that is repeated, as its forward raised or its gradients were dropped.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from zero_core._torch import is_in_backward, outside_graphs, seed_generators
from zero_core.comm.communicator import Communicator
from zero_core.comm.topology import Ranks
from zero_core.config import Config
from zero_core.core.extension import Extension
from zero_core.errors import ConfigError
from zero_core.optim.train_state import TrainState


class Invariance(Extension):
    """Seeds each micro-batch, and refuses what would add in another order at another world size."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        train: TrainState,
        ranks: Ranks,
    ) -> None:
        """Hook ``model``. ``train`` knows the step and the micro-step."""
        self._train = train
        self._seed = config.seed or 0
        self._ranks = ranks
        self._seeded = (-1, -1, -1)  # `_place` of the last seed
        self._reduced = (-1, -1, -1)  # `_place` of the last backward
        self._is_running = False  # also after a forward that raised
        self.handles = [
            model.register_forward_pre_hook(outside_graphs(self._enter), prepend=True),
            model.register_forward_hook(outside_graphs(self._leave)),
        ]

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
            number = place[1] * self._ranks.size + self._ranks.rank  # in the step
            seed_generators(self._ranks.device, self._seed, self._train.global_steps, number)
        self._is_running = True

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not is_in_backward():
            self._is_running = False

    def begin_backward(self, *, is_new: bool) -> None:
        """Refuse a backward whose terms would be added in another order at another world size.

        Raises:
            RuntimeError: the loss was not divided, or the micro-step had a backward before.
        """
        if not self._train.scaler.is_applied:
            raise RuntimeError(
                "world_size_invariant divides each loss by all ranks' micro-batches before "
                "backward: call engine.backward(loss), or engine.scale(loss).backward()"
            )
        if self._reduced == self._place:
            raise RuntimeError(
                "world_size_invariant: a second backward in one micro-step, whose gradients would "
                "be added in another order at another world size: add up the losses and call "
                "engine.backward() once, then engine.step()"
            )
        self._reduced = self._place

    def before_local_sums(self) -> None:
        raise RuntimeError(
            "world_size_invariant: gradients that are added up on their rank first would be "
            "added in another order at another world size. Leave no_sync() and "
            "set_requires_gradient_sync(False) out: each backward is reduced"
        )


def check_invariance(config: Config, communicator: Communicator, ranks: Ranks) -> None:
    """Refuse what cannot give the same bits at any world size.

    Raises:
        ConfigError: the collectives or the optimizer's place do not permit it.
    """
    if not communicator.can_add:
        raise ConfigError(
            "world_size_invariant needs collectives with reduce_add, as of "
            f"zero_core.protocols.AddingCollectives: {type(communicator.transport).__name__} has "
            "none"
        )
    offload = config.zero_optimization.offload_optimizer
    is_split = offload.device_budget is not None or offload.ratio not in (0.0, 1.0, None)
    if offload.device != "none" and is_split and ranks.device.type != "cpu":
        raise ConfigError(
            f"world_size_invariant on {ranks.device.type} with a part of the optimizer on the "
            "host: host and device differ by units in the last place, and each world size has the "
            "border elsewhere. Set zero_optimization.offload_optimizer.ratio to 0 or 1, or name "
            "the host's parameters in offload_optimizer.parameters"
        )
