"""Policies by which the state tier updates: after the decision, ahead of it, or in backward.

[Note: update ahead]
A host that reads the sum of the step's facts before it enqueues the update leaves the device
without work meanwhile. So where the state tier can (`DeviceTier.can_step_ahead`), the decision is
computed on the device, the update of the parameters that have a gradient here is enqueued, and the
host reads then. If the step is not taken, or some rank has gradients that are not reduced yet, that
update has changed nothing. Parameters that only other ranks have used are updated after it.

[Note: optimizer in backward]
With ``update_in_backward`` a segment is updated as soon as its gradient is added: the host works on
one unit while the device computes the next. Where nothing later in the step may change a gradient
or skip the step (without clipping, fp16's loss scale and ``check_grad_overflow``) the update is
final. Whoever changes or drops gradients after all gets an error.

[Note: speculation]
Elsewhere the last gradient of backward decides on the step. The state tier may begin it all the
same, as if it were taken without clipping, and undo it where that turns out wrong
(`zero_core.protocols.SpeculativeTier`). No number depends on it. An update that is undone costs the
host two copies of its states and itself again, and one that is kept a copy. So the configuration
must ask for it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from zero_core.config import Config
from zero_core.errors import ConfigError
from zero_core.optim.device_tier import DeviceTier
from zero_core.optim.train_state import TrainState
from zero_core.optim.whole_tier import WholeTier
from zero_core.protocols import SpeculativeTier, StateTier

_log = logging.getLogger(__name__)


def updates_in_backward(config: Config) -> bool:
    """Whether units are updated in backward for good, as configured.

    By default: with optimizer offload and no clipping, fp16 or overflow check. Nor with
    ``memory_checkpoint``, which reads the states beside backward.
    """
    offload = config.zero_optimization.offload_optimizer
    if config.can_cancel_steps:
        return False
    if offload.update_in_backward is not None:
        return offload.update_in_backward
    return offload.device != "none" and config.memory_checkpoint is None


def may_speculate(config: Config) -> bool:
    """Whether units are updated in backward such that it can be undone, as configured.

    By default: with a size of the undo log, and without ``memory_checkpoint``.
    """
    offload = config.zero_optimization.offload_optimizer
    if offload.device != "cpu" or not config.can_cancel_steps:
        return False
    if offload.update_in_backward is not None:
        return offload.update_in_backward
    return offload.undo_buffer_size is not None and config.memory_checkpoint is None


class UpdatePolicy:
    """Updates after the step's decision, from which the other policies differ."""

    begins_early: ClassVar[bool] = False  # updates begin in backward, before the step is decided
    is_final: ClassVar[bool] = False  # such an update stays, whatever comes
    undo_bytes = 0  # host memory of an undo log
    ahead: Sequence[int] = ()  # pieces whose update was enqueued, until `step` has ended it

    def __init__(self, tier: StateTier, train: TrainState) -> None:
        self._tier = tier
        self._train = train

    def reduced(self, active: Sequence[int], *, grad_scale: float) -> bool:
        """Take a segment of which pieces ``active`` were offered. Return whether it is updated."""
        return False

    @property
    def can_step_ahead(self) -> bool:
        return False

    def step_ahead(
        self, active: Sequence[int], *, grad_scale: Tensor | float, found_inf: Tensor
    ) -> None:
        """Enqueue the update: see `DeviceTier`. Called where `can_step_ahead` alone."""

    def settle(self, *, is_void: bool) -> None:
        """Note the decision on an update that was enqueued ahead."""

    def step(self, active: Sequence[int], *, grad_scale: float) -> None:
        """Update pieces as decided."""
        self._tier.step(self._train.hyperparameters(), active, grad_scale=grad_scale)

    def check_unused(self, what: str) -> None:
        """Raise if an update has used the gradient already: ``what`` is possible only before."""

    def clear(self) -> None:
        """Begin a new step."""


class AheadPolicy(UpdatePolicy):
    """See [Note: update ahead]."""

    _tier: DeviceTier

    @property
    def can_step_ahead(self) -> bool:
        return self._tier.can_step_ahead  # a load may bring groups with other kernels

    def step_ahead(
        self, active: Sequence[int], *, grad_scale: Tensor | float, found_inf: Tensor
    ) -> None:
        self.ahead = active
        groups = self._train.hyperparameters()
        self._tier.step_ahead(groups, active, grad_scale=grad_scale, found_inf=found_inf)

    def settle(self, *, is_void: bool) -> None:
        if self.ahead:
            self._tier.settle(is_void=is_void)
        if is_void:
            self.ahead = ()

    def step(self, active: Sequence[int], *, grad_scale: float) -> None:
        done, groups = set(self.ahead), self._train.hyperparameters()
        self._tier.step(groups, [i for i in active if i not in done], grad_scale=grad_scale)
        self.ahead = ()

    def clear(self) -> None:
        self.ahead = ()


class InBackwardPolicy(UpdatePolicy):
    """See [Note: optimizer in backward]."""

    begins_early = is_final = True
    _settings = ""  # that pieces were updated with

    def __init__(self, tier: StateTier, train: TrainState) -> None:
        super().__init__(tier, train)
        self._updated: set[int] = set()  # pieces, in this step

    def reduced(self, active: Sequence[int], *, grad_scale: float) -> bool:
        if active:
            groups = self._train.hyperparameters()
            self._settings = self._settings or repr(groups)
            self._updated.update(active)  # before it: an exception may leave it half-updated
            # Nothing scales or clips where updates are final: ``grad_scale`` is 1.
            self._tier.step(groups, active, grad_scale=1.0)
        return bool(active)

    def step(self, active: Sequence[int], *, grad_scale: float) -> None:
        if self._updated and repr(self._train.hyperparameters()) != self._settings:
            self.check_unused("changing the optimizer's settings between backward and step")
        super().step([i for i in active if i not in self._updated], grad_scale=grad_scale)

    def check_unused(self, what: str) -> None:
        if self._updated:
            raise RuntimeError(
                f"{what}: too late, units have been updated during backward, as there is no "
                "clipping and check_grad_overflow is false. Set "
                "zero_optimization.offload_optimizer.update_in_backward to false; a step that "
                "broke off midway can only be repeated from a checkpoint"
            )

    def clear(self) -> None:
        self._updated.clear()
        self._settings = ""


class UndoPolicy(UpdatePolicy):
    """See [Note: speculation]."""

    begins_early = True
    _tier: SpeculativeTier

    def __init__(self, tier: SpeculativeTier, train: TrainState) -> None:
        super().__init__(tier, train)
        self.undo_bytes = tier.undo_bytes

    def reduced(self, active: Sequence[int], *, grad_scale: float) -> bool:
        self._tier.speculate(self._train.hyperparameters(), active, grad_scale=grad_scale)
        return False


def choose_policy(tier: StateTier, train: TrainState, config: Config, *, rank: int) -> UpdatePolicy:
    """Return what the configuration and the tier allow."""
    # A tier of whole parameters steps together on all ranks, when all gradients are there.
    if updates_in_backward(config) and not isinstance(tier, WholeTier):
        return InBackwardPolicy(tier, train)
    if may_speculate(config):
        if isinstance(tier, SpeculativeTier) and tier.enable_undo():
            if rank == 0:
                _log.info(
                    "offloaded units are updated in backward, with %d bytes of undo log on a rank",
                    tier.undo_bytes,
                )
            return UndoPolicy(tier, train)
        if config.zero_optimization.offload_optimizer.update_in_backward:
            raise ConfigError(
                "zero_optimization.offload_optimizer.update_in_backward needs updates that can be "
                "undone, as gradient_clipping, fp16 or check_grad_overflow may change or cancel a "
                "step: those of Adam, AdamW, Adagrad, SGD or Lion by cpu-adam's kernel (pip "
                "install zero-offload[cpu-adam]). Found another optimizer, no kernel or another "
                "tier: leave the key out"
            )
        if rank == 0:
            _log.info(
                "offloaded units are updated after backward: no kernel of this optimizer can be "
                "undone"
            )
    if isinstance(tier, DeviceTier):
        return AheadPolicy(tier, train)
    return UpdatePolicy(tier, train)
