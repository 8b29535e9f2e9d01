"""Policies for when the state tier updates: after the decision, ahead of it, or in backward.

[Note: update ahead]
If the host reads the step's facts before it enqueues the update, the device is idle meanwhile. So
if the state tier can (`DeviceTier.can_step_ahead`), the device computes the decision, the host
enqueues the update of the parameters with a gradient on this rank, and then reads the facts. If the
step is skipped, or some rank has unreduced gradients, the enqueued update changes nothing.
Parameters used only by other ranks are updated afterwards.

[Note: optimizer in backward]
With ``update_in_backward`` a segment is updated as soon as its gradient is reduced. The host
updates one unit while the device computes the next. The update is final if nothing later in the
step can change a gradient or skip the step: no clipping, no fp16 loss scale and no
``check_grad_overflow``. Changing or dropping gradients afterwards raises an error.

[Note: speculation]
With clipping, fp16 or ``check_grad_overflow`` the decision needs the last gradient of backward. The
state tier may still update early, as if the step were taken without clipping, and undo the update
if the decision differs (`zero_core.protocols.SpeculativeTier`). Results are the same. An undone
update costs two copies of the states and a second update. A kept one costs one copy. So speculation
must be enabled in the configuration.
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
    """Return whether the configuration makes final updates of units in backward.

    False with clipping, fp16 or ``check_grad_overflow``. The default is true with optimizer
    offload, unless a ``memory_checkpoint`` reads the states during backward.
    """
    offload = config.zero_optimization.offload_optimizer
    if config.can_cancel_steps:
        return False
    if offload.update_in_backward is not None:
        return offload.update_in_backward
    return offload.device != "none" and config.memory_checkpoint is None


def may_speculate(config: Config) -> bool:
    """Return whether the configuration makes updates in backward that can be undone.

    True only with offload to the CPU, and with clipping, fp16 or ``check_grad_overflow``. The
    default is true if ``undo_buffer_size`` is set and ``memory_checkpoint`` is not.
    """
    offload = config.zero_optimization.offload_optimizer
    if offload.device != "cpu" or not config.can_cancel_steps:
        return False
    if offload.update_in_backward is not None:
        return offload.update_in_backward
    return offload.undo_buffer_size is not None and config.memory_checkpoint is None


class UpdatePolicy:
    """Policy that updates after the decision on the step. Base of the other policies."""

    begins_early: ClassVar[bool] = False  # whether updates begin in backward
    is_final: ClassVar[bool] = False  # whether updates in backward cannot be undone
    undo_bytes = 0  # host memory of an undo log
    ahead: Sequence[int] = ()  # pieces whose update is enqueued, until `step` completes it

    def __init__(self, tier: StateTier, train: TrainState) -> None:
        self._tier = tier
        self._train = train

    def reduced(self, active: Sequence[int], *, grad_scale: float) -> bool:
        """Handle a reduced segment. Return whether its ``active`` pieces had a final update."""
        return False

    @property
    def can_step_ahead(self) -> bool:
        return False

    def step_ahead(
        self, active: Sequence[int], *, grad_scale: Tensor | float, found_inf: Tensor
    ) -> None:
        """Enqueue the update: see `DeviceTier`. Called only if `can_step_ahead`."""

    def settle(self, *, is_void: bool) -> None:
        """Apply the decision to an update that was enqueued ahead. ``is_void`` cancels it."""

    def step(self, active: Sequence[int], *, grad_scale: float) -> None:
        """Update the ``active`` pieces, after the decision."""
        self._tier.step(self._train.hyperparameters(), active, grad_scale=grad_scale)

    def check_unused(self, what: str) -> None:
        """Raise if an update has already used the gradient. ``what``: the refused action."""

    def clear(self) -> None:
        """Start a new step."""


class AheadPolicy(UpdatePolicy):
    """Policy that enqueues the update before the host decides. See [Note: update ahead]."""

    _tier: DeviceTier

    @property
    def can_step_ahead(self) -> bool:
        return self._tier.can_step_ahead  # may change when a load replaces the groups

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
    """Policy of final updates in backward. See [Note: optimizer in backward]."""

    begins_early = is_final = True
    _settings = ""  # hyperparameters used by this step's updates

    def __init__(self, tier: StateTier, train: TrainState) -> None:
        super().__init__(tier, train)
        self._updated: set[int] = set()  # pieces updated in this step

    def reduced(self, active: Sequence[int], *, grad_scale: float) -> bool:
        if active:
            groups = self._train.hyperparameters()
            self._settings = self._settings or repr(groups)
            self._updated.update(active)  # first, because ``step`` may raise midway
            # Final updates exclude scaling and clipping, so ``grad_scale`` is 1.
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
    """Policy of updates in backward that can be undone. See [Note: speculation]."""

    begins_early = True
    _tier: SpeculativeTier

    def __init__(self, tier: SpeculativeTier, train: TrainState) -> None:
        super().__init__(tier, train)
        self.undo_bytes = tier.undo_bytes

    def reduced(self, active: Sequence[int], *, grad_scale: float) -> bool:
        self._tier.speculate(self._train.hyperparameters(), active, grad_scale=grad_scale)
        return False


def choose_policy(tier: StateTier, train: TrainState, config: Config, *, rank: int) -> UpdatePolicy:
    """Return the policy that the configuration requires and the tier supports."""
    # A `WholeTier` makes one step on all ranks, after all gradients are complete.
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
