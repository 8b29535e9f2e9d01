"""The gradient of one step, the decision on its update, and when the state tier updates.

The passes call `StepGradient.add` with each segment's reduced gradient. It keeps the gradient's
norm and offers the gradient to the state tier, or leaves that to `agree` if the tier reads it in
place. `agree` sums the statistics over all ranks, `decide` decides whether to update, and `apply`
updates what the `UpdatePolicy` has not updated earlier.

[Note: agreement by hash]
Hyperparameters and other settings must be equal on all ranks. The all-reduce of a step's facts sums
each 16-bit word ``h`` of their hash, and ``h * h``, over the ``n`` ranks. All ranks have the same
``h`` if and only if ``n * sum(h * h) == sum(h) ** 2``. The sums are exact in float64 for up to
2**21 ranks. The two products may be rounded, but equal products round equally.

[Note: update ahead]
If the host reads the step's facts before it enqueues the update, the device is idle meanwhile. So
if the state tier can (`DeviceTier.can_step_ahead`), the device computes the decision, the host
enqueues the update of the parameters with a gradient on this rank, and then reads the facts. If the
step is skipped or the facts are void (`Facts.device_is_void`), the enqueued update changes nothing.
Parameters with a gradient only on other ranks are updated afterwards.

[Note: optimizer in backward]
With ``update_in_backward`` a segment is updated as soon as its gradient of the step is reduced. An
offloaded unit is updated on the host while the device computes the next unit's backward. The update
is final if nothing later in the step can change a gradient or skip the step: no clipping, no fp16
and no ``check_grad_overflow``. Changing or dropping gradients afterwards raises an error.

[Note: speculation]
With clipping, fp16 or ``check_grad_overflow`` the decision needs the last gradient of backward. The
state tier may still update early, as if the step were taken without clipping, and undo the update
if the decision differs (`zero_core.protocols.SpeculativeTier`). Results are the same. A kept update
costs one copy of the states. An undone update costs two copies and, unless the step is skipped, a
second update. So speculation must be enabled in the configuration: see `may_speculate`.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor

from zero_core.comm.communicator import Communicator
from zero_core.config import Config
from zero_core.core.access import find_trainable
from zero_core.core.extension import Extensions
from zero_core.core.facts import NUM_WORDS, Facts
from zero_core.core.grads import Arithmetic, FlatGrads
from zero_core.core.passes import BackwardPass
from zero_core.errors import ConfigError, RankMismatchError
from zero_core.optim.device_tier import DeviceTier
from zero_core.optim.train_state import TrainState, describe_groups
from zero_core.optim.whole_tier import WholeTier
from zero_core.parts import install_command
from zero_core.protocols import AccumulatingTier, SpeculativeTier, StateTier
from zero_core.sharded.sharded_state import ShardedState
from zero_core.step.param_grads import SHARDED, UPDATED_IN_BACKWARD, ParamGrads

_log = logging.getLogger(__name__)
CLIP_EPSILON = 1e-6
"""Epsilon that `torch.nn.utils.clip_grad_norm_` adds to the norm."""
_CHANGED = "param.grad was changed to values that are not finite"
_MAX_NAMED = 3
_MAX_RANKS = 8


def updates_in_backward(config: Config) -> bool:
    """Return whether the configuration asks for updates in backward that cannot be undone.

    False with clipping, fp16 or ``check_grad_overflow``. The default is true with optimizer
    offload, unless a ``memory_checkpoint`` may read the states during backward.
    """
    offload = config.zero_optimization.offload_optimizer
    if config.can_cancel_steps:
        return False
    if offload.update_in_backward is not None:
        return offload.update_in_backward
    return offload.device != "none" and config.memory_checkpoint is None


def may_speculate(config: Config) -> bool:
    """Return whether the configuration asks for updates in backward that can be undone.

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
    undo_bytes = 0  # size of the undo log in host memory
    ahead: Sequence[int] = ()  # pieces whose update `step_ahead` has enqueued in this step

    def __init__(self, tier: StateTier, train: TrainState) -> None:
        self._tier = tier
        self._train = train

    def reduced(self, active: Sequence[int], *, grad_scale: float) -> bool:
        """Handle a reduced segment. Return whether ``active`` got updates that cannot be undone."""
        return False

    @property
    def can_step_ahead(self) -> bool:
        return False

    def step_ahead(
        self, active: Sequence[int], *, grad_scale: Tensor | float, found_inf: Tensor
    ) -> None:
        """Enqueue the update: see `DeviceTier.step_ahead`. Called only if `can_step_ahead`."""

    def settle(self, *, is_void: bool) -> None:
        """Finish `step_ahead`, if it was called. ``is_void``: the update has changed nothing."""

    def step(self, active: Sequence[int], *, grad_scale: float) -> None:
        """Update the ``active`` pieces, after the decision, unless they are updated already."""
        self._tier.step(self._train.hyperparameters(), active, grad_scale=grad_scale)

    def check_unused(self, what: str) -> None:
        """Raise RuntimeError if this step has made final updates. ``what``: the refused action."""

    def clear(self) -> None:
        """Start a new step."""


class AheadPolicy(UpdatePolicy):
    """Policy that enqueues the update before the host decides. See [Note: update ahead]."""

    _tier: DeviceTier

    @property
    def can_step_ahead(self) -> bool:
        return self._tier.can_step_ahead  # a load may change the groups

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
    _settings = ""  # repr of the hyperparameters that this step's updates in backward used

    def __init__(self, tier: StateTier, train: TrainState) -> None:
        super().__init__(tier, train)
        self._updated: set[int] = set()  # pieces updated in this step's backward

    def reduced(self, active: Sequence[int], *, grad_scale: float) -> bool:
        if active:
            groups = self._train.hyperparameters()
            self._settings = self._settings or repr(groups)
            self._updated.update(active)  # before ``step``, which may raise midway
            # `updates_in_backward` excludes loss scaling and clipping.
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
    """Return the policy for ``tier``. Raises ConfigError if a required undo is not supported."""
    # All ranks must call `WholeTier.step` together, so it cannot follow each reduction.
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
                "step: those of Adam, AdamW, Adagrad, SGD or Lion by cpu-adam's kernel. Found "
                "another optimizer, no kernel or another tier: leave the key out, or "
                f"{install_command('cpu-adam')}"
            )
        if rank == 0:
            _log.info(
                "offloaded units are updated after backward: no kernel of this optimizer can be "
                "undone"
            )
    if isinstance(tier, DeviceTier):
        return AheadPolicy(tier, train)
    return UpdatePolicy(tier, train)


class StepGradient:
    """Gradient of the current step: implementation of `zero_core.core.passes.GradientSink`."""

    def __init__(
        self,
        state: ShardedState,
        communicator: Communicator,
        train: TrainState,
        config: Config,
        facts: Facts,
        extensions: Extensions,
        arithmetic: Arithmetic,
    ) -> None:
        self._extensions = extensions
        self.params_with_grad: set[int] = set()  # parameter numbers, on this rank
        self._decided: tuple[list[int], float] = [], 1.0  # set by `decide`: active pieces, scale
        self._state = state
        self._communicator = communicator
        self._train = train
        self._config = config
        self._arithmetic = arithmetic
        self._facts = facts
        self._hashed: tuple[Sequence[Any], list[float]] = (), []  # settings and their hash
        self._is_agreed = False  # whether the facts cover the current gradient
        self._changed_square_sum: Tensor | None = None  # set if param.grad was changed
        self._clipped = 1.0  # product of the factors of `clip` in this step
        # Number and tensor of each trained parameter of which this rank keeps all elements.
        self._whole_params = [
            (slot.param, param)
            for flat in state.params
            if flat.is_kept and flat.segment.is_trainable
            for slot, param in zip(flat.segment.slots, flat.params, strict=True)
        ]
        self.grads: dict[int, FlatGrads] = {}  # by segment index
        # By segment index: the norm of this rank's shard or, if the tier accumulates gradients, a
        # function that returns the sum of squares.
        self._norms: dict[int, Tensor | Callable[[], Tensor]] = {}
        self.policy = choose_policy(state.tier, train, config, rank=state.control.rank)
        at_stage_0 = UPDATED_IN_BACKWARD * self.policy.is_final
        why_none = SHARDED if config.zero_optimization.stage else at_stage_0
        self.param_grads = ParamGrads(state, self.params_with_grad, why_none)

    @property
    def is_boundary(self) -> bool:
        return self._train.is_boundary

    @property
    def is_reduced(self) -> bool:
        return len(self._norms) == len(self._state.starts)

    def scale(self, loss: Tensor, over: int | None) -> Tensor:
        """Return ``loss`` times the loss scale, divided by ``over`` or by the micro-steps."""
        train, steps = self._train, self._train.accumulation_steps if over is None else over
        if steps < 1:
            raise ValueError(f"over = {over}: expected a number of micro-steps, 1 or more")
        if self._config.world_size_invariant:
            steps *= self._communicator.world_size
        train.scaler.is_applied = True
        if train.scaler.scale != 1.0:
            loss = loss * train.scaler.scale
        return loss / steps if steps > 1 else loss

    @property
    def scale_factor(self) -> float:
        """Factor that removes the loss scale from gradients and applies the factors of `clip`."""
        return self._clipped / self._train.scaler.scale

    @cached_property
    def _is_checked(self) -> bool:
        """Whether a non-finite gradient skips the step."""
        return self._config.check_grad_overflow or self._config.loss_scaling.enabled

    def begin_backward(self, *, is_new_round: bool) -> None:
        if self.param_grads.is_used:
            changes = self.param_grads.note_changes(is_agreed=False)
            if self._communicator.world_size > 1:  # other ranks may still read this rank's shards
                self.param_grads.keep_changes(changes)
            else:
                self._take_changes(changes)
        self._hide_param_grads()
        self.reopen()
        if self.policy.begins_early:
            self.policy.check_unused("a further backward of the same step")
            for before in self._extensions.before_early_update:
                before()
        scaler = self._train.scaler
        if scaler.config.enabled and not scaler.is_applied:
            raise RuntimeError(
                "Loss scaling is required in fp16: call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )
        for follow in self._extensions.begin_backward:
            follow(is_new=is_new_round)

    def _hide_param_grads(self) -> None:
        """Hide the gradient from ``param.grad``, until it is complete again."""
        self.param_grads.complete.clear()
        self.param_grads.given.clear()

    def reopen(self) -> None:
        self._is_agreed = False
        self._changed_square_sum = None

    def add(self, grads: FlatGrads, *, is_last: bool) -> bool:
        self._is_agreed = False
        self._changed_square_sum = None
        tier, index = self._state.tier, grads.segment.index
        reduced, start = grads.result(), self._state.starts[index]
        self.grads[index] = grads
        self._norms.pop(index, None)
        if is_last:
            self.param_grads.complete[index] = grads
            self.param_grads.given.pop(index, None)
        if reduced.norm is not None:
            self._norms[index] = reduced.norm
            if self.policy.is_final:
                grads.wait()
            if tier.owns_grads or self.policy.begins_early:
                grads.shard.release(tier.offer_grad(start, reduced.shard))
        else:  # one micro-step's gradient: `plan_gradient` plans it only for an AccumulatingTier
            accumulating = cast(AccumulatingTier, tier)
            grads.shard.release(accumulating.add_grad(start, reduced.shard, is_last=is_last))
            if not is_last:
                return False
            self._norms[index] = accumulating.square_sum(start, start + reduced.shard.numel())
        if not self.policy.begins_early:
            return False
        # `UpdatePolicy.step` updates parameters without a gradient on this rank, because only then
        # is it known whether another rank has a gradient for them.
        pieces, own = self._state.pieces, self._state.pieces_of.get(index, ())
        active = [i for i in own if pieces[i].param in self.params_with_grad]
        is_updated = self.policy.reduced(active, grad_scale=self.scale_factor)
        grads.is_updated |= is_updated
        return is_updated

    def broken(self) -> None:
        self._train.restart_step()
        self.policy.check_unused("dropping gradients")

    def drop_untaken(self) -> bool:
        return self.param_grads.drop_untaken()

    def agree(self, backward: BackwardPass) -> None:
        is_changed, changes = self.param_grads.is_used, {}
        if is_changed:
            self.param_grads.take_assigned()
            changes = self.param_grads.note_changes(is_agreed=self._is_agreed)
        if not self._is_agreed:
            # Wait for gathers of gradients before exchanging facts: afterwards, ranks may overwrite
            # gradients that others have read.
            tier = self._state.tier
            is_read_in_place = not (tier.owns_grads or self.policy.begins_early)
            for index, grads in self.grads.items():
                grads.wait()
                if is_read_in_place:
                    tier.offer_grad(self._state.starts[index], grads.covered())
            square_sums = self._square_sums()
            self._facts.begin()
            self.fill(self._facts)
            backward.fill(self._facts)
            self._facts.start_sum(square_sums)
            self._is_agreed = True
        if is_changed and self._take_changes(changes):
            square_sums = self._square_sums(is_covered=self._communicator.world_size > 1)
            self._arithmetic.finish(square_sums)
            self._changed_square_sum = square_sums[0]

    def fill(self, facts: Facts) -> None:
        for fill in self._extensions.fill:
            fill(facts)
        facts.put("with gradient", bool(self.params_with_grad))
        facts.mark("used", self.params_with_grad)
        changed: list[str] = []
        if self.param_grads.is_used:
            changed = self.param_grads.begin_agreement(self._communicator)
        alike = (
            describe_groups(self._train.hyperparameters()),
            find_trainable(self._state.trained_params),
            self._state.common_buffers.described,
            self._train.accumulation_steps,
            self._train.scaler.scale,
            changed,
        )
        if alike != self._hashed[0]:  # comparing is faster than hashing
            digest = hashlib.sha256(repr(alike).encode()).digest()
            pairs = (digest[2 * i : 2 * i + 2] for i in range(NUM_WORDS))
            self._hashed = alike, [float(int.from_bytes(pair, "big")) for pair in pairs]
        facts.put_hash(self._hashed[1])

    def _square_sums(self, *, is_covered: bool = False) -> Tensor:
        """Sum the squares of this rank's shards, or of all that it updates (``is_covered``)."""
        norms, squares = [], []
        # In layout order, because the order of reductions may differ between steps.
        for index in sorted(self._norms):
            grads, norm = self.grads[index], self._norms[index]
            if is_covered:
                values = grads.covered()
                if grads.plan.offered is torch.float16:  # casting may overflow
                    values = values.to(torch.float16)
                norm = self._arithmetic.measure(values, 2.0, grads.plan.normed)
            if isinstance(norm, Tensor):
                norms.append(norm)
                continue
            square, device = norm(), self._state.device
            if square.device != device:  # `to` would wait for the device
                square = torch.full((), square.item(), dtype=square.dtype, device=device)
            squares.append(square.view(1))
        return self._arithmetic.add_squares(norms, squares)

    def _take_changes(self, changes: Mapping[int, Mapping[int, Tensor]]) -> bool:
        """Write ``changes`` of ``param.grad`` into the gradient. Return whether there are any."""
        changed, tier = self.param_grads.take_changes(changes), self._state.tier
        for grads in changed:
            index = grads.segment.index
            if tier.owns_grads:
                reduced = grads.changed_result()
                grads.shard.release(tier.offer_grad(self._state.starts[index], reduced.shard))
                assert reduced.norm is not None, "it is the whole gradient"
                self._norms[index] = reduced.norm
            else:  # the tier reads the changed memory directly
                self._norms[index] = grads.norm()
        return bool(changed)

    def void_update(self) -> None:
        self.policy.settle(is_void=True)

    def clear(self) -> None:
        if self.policy.ahead:  # the step was aborted after `update_ahead`
            _, is_taken, _ = self._decide_by(self._square_sum)
            self.policy.settle(is_void=self._facts.is_void or not is_taken)
        self.reopen()
        if self.param_grads.is_used:
            self.param_grads.clear()
        self._hide_param_grads()
        self.params_with_grad.clear()
        self._state.tier.discard_grads()
        self._train.num_drops += 1
        self._norms.clear()
        self.policy.clear()
        self._clipped = 1.0

    def clip(self, max_norm: float, p: float) -> float:
        """Clip the gradient, and return its former ``p``-norm. All ranks call it after `agree`."""
        if p == 2.0:
            norm = math.sqrt(self._square_sum)
        else:
            grads = [grads for _, grads in sorted(self.grads.items())]
            norms = [g.norm(p).to(self._state.device, torch.float64) for g in grads]
            norm = self._arithmetic.over_ranks(norms, p, self._state.control)
        norm *= self.scale_factor
        self._clipped *= clip_factor(norm, max_norm)
        return norm

    def update_ahead(self) -> None:
        """Enqueue the update before the host reads the facts, if the policy can."""
        self._hide_param_grads()
        if self._facts.is_known or not self.policy.can_step_ahead:
            return
        pieces = enumerate(self._state.pieces)
        active = [i for i, piece in pieces if piece.param in self.params_with_grad]
        if not active:
            return
        square_sum, is_void = self._changed_square_sum, self._facts.device_is_void
        if square_sum is None:
            square_sum = self._facts.device_square_sum
        # The same operations as `_decide_by`, on float64 tensors, for bit-identical results.
        # Divisors are tensors, because torch divides by a Python number via its reciprocal.
        scale = torch.full_like(square_sum, self._train.scaler.scale)
        norm = square_sum.sqrt() / scale
        if self._is_checked:
            is_void = is_void | ~torch.isfinite(norm)
        found_inf = is_void.to(torch.float32)
        max_norm = self._config.gradient_clipping
        grad_scale: Tensor | float = 1.0
        if max_norm > 0.0 or self._clipped != 1.0 or self._train.scaler.scale != 1.0:
            factor = torch.full_like(norm, self._clipped)
            if max_norm > 0.0:
                clipped = norm * factor
                limit = torch.full_like(norm, max_norm) / (clipped + CLIP_EPSILON)
                factor = factor * torch.where(torch.isfinite(clipped), limit.clamp(max=1.0), 1.0)
            grad_scale = torch.where(is_void, 1.0, factor / scale)
        self.policy.step_ahead(active, grad_scale=grad_scale, found_inf=found_inf)

    def _decide_by(self, square_sum: float) -> tuple[float, bool, float]:
        """Return the unscaled norm before clipping, whether to update, and the gradient scale."""
        scale = self._train.scaler.scale
        norm = math.sqrt(square_sum) / scale
        factor = self._clipped * clip_factor(norm * self._clipped, self._config.gradient_clipping)
        return norm, math.isfinite(norm) or not self._is_checked, factor / scale

    def decide(self) -> str:
        """Decide from the facts whether to update. Return why the step is skipped, or "".

        Raises:
            RankMismatchError: settings or written values differ between ranks.
            CollectiveError: a message of a reduction or gather was damaged.
        """
        if self._facts.is_void:
            self.policy.settle(is_void=True)
            if self._facts.is_any("damaged"):
                has_updates = "updated in backward by damaged gradients: load a checkpoint"
                outcome = has_updates if self.policy.is_final else "not updated"
                self._communicator.refuse_damaged(outcome)
            if not self._facts.is_hash_agreed:
                self.reopen()  # ranks may correct the settings and call step() again
                self.param_grads.forget_last_changes()
                _refuse_step(self._state, self._train, self._hashed[0][-1])
        if self._communicator.checks is not None:
            self._communicator.checks.clear()
        if self._state.common_buffers.is_changed:
            self._state.common_buffers.confirm()
        for follow in self._extensions.before_decision:
            follow(self._train.global_steps + 1)
        if self.param_grads.is_used:
            self.param_grads.decided()
        self._hide_param_grads()
        used = self._facts.counts("used")
        for param in self.param_grads.set_params:  # assigned after the facts were summed
            used[param] = float(param in self.params_with_grad)
        norm, is_taken, grad_scale = self._decide_by(self._square_sum)
        self.policy.settle(is_void=not is_taken)
        why_skipped = _CHANGED
        if self._is_checked and not math.isfinite(self._facts.square_sum):
            # All ranks run this, even if a change of param.grad replaced the non-finite values.
            self._communicator.forget_errors()  # drop the error feedback of quantization
            why_skipped = _explain_nonfinite(self.grads, self._state)
        active = [i for i, p in enumerate(self._state.pieces) if used[p.param] > 0]
        self._decided = active, grad_scale
        self._train.grad_norm = norm
        return "" if is_taken else why_skipped

    @property
    def _square_sum(self) -> float:
        if self._changed_square_sum is not None:
            return self._changed_square_sum.item()
        return self._facts.square_sum

    def apply(self) -> None:
        active, grad_scale = self._decided
        self.policy.step(active, grad_scale=grad_scale)
        if self._whole_params:
            # Like an in-place optimizer update, this makes torch refuse a backward of an earlier
            # forward.
            used = self._facts.counts("used")
            updated = [param for number, param in self._whole_params if used[number]]
            torch.autograd.graph.increment_version(updated)


def _refuse_step(state: ShardedState, train: TrainState, changes: Sequence[str]) -> NoReturn:
    """Raise RankMismatchError that names differing settings. All ranks must call it."""
    control, facts = state.control, describe_groups(train.hyperparameters())
    for param in state.trained_params:
        name = state.param_names[id(param)]
        facts[f"parameter {name}"] = "trainable" if param.requires_grad else "frozen"
    facts |= state.common_buffers.described
    facts["gradient_accumulation_steps"] = str(train.accumulation_steps)
    facts["loss scale"] = str(train.scaler.scale)
    facts["changes"] = ", ".join(changes) or "none"
    raise RankMismatchError(
        f"rank {control.rank}, step {train.global_steps + 1}: not updated, as ranks differ in "
        f"{control.differences(facts)}. "
        "Every rank must set the same: a schedule that follows the loss needs the mean over "
        "all ranks"
    )


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor that clips ``norm``: 1 if ``max_norm`` is 0 or ``norm`` is not finite."""
    if max_norm <= 0.0 or not math.isfinite(norm):
        return 1.0
    return min(1.0, max_norm / (norm + CLIP_EPSILON))


def _explain_nonfinite(grads_of: Mapping[int, FlatGrads], state: ShardedState) -> str:
    """Name up to `_MAX_NAMED` parameters with a non-finite gradient, and the ranks that caused it.

    Every rank must call it. A parameter is listed with all ranks that produced non-finite values
    in its segment.
    """
    names, seen = [], []
    for index, grads in grads_of.items():
        ranks = grads.nonfinite_ranks()
        if ranks is not None:
            seen.append((index, ranks))
        bad = torch.nonzero(~torch.isfinite(grads.values())).flatten()
        if bad.numel():
            at = bad.cpu() + grads.segment.shard_range(state.control.rank)[0]
            names += [
                (state.layout.params[slot.param].name, index)
                for slot in grads.segment.slots
                if bool(((at >= slot.start) & (at < slot.stop)).any())
            ]
    rows = state.control.gather_json({"names": names, "ranks": seen})
    # One rank may know the ranks of a segment, and another rank the names of the parameters.
    by_segment: dict[int, set[int]] = {}
    for index, ranks in (pair for row in rows for pair in row["ranks"]):
        by_segment.setdefault(index, set()).update(ranks)
    by_name = {name: by_segment.get(index) for row in rows for name, index in row["names"]}
    named = [_describe(name, ranks) for name, ranks in list(by_name.items())[:_MAX_NAMED]]
    if len(by_name) > len(named):
        named.append(f"and {len(by_name) - len(named)} more")
    return "; ".join(named) or "no element by itself, their norm overflows"


def _describe(name: str, ranks: set[int] | None) -> str:
    if ranks is None:
        return f"{name}: which rank's batch did it is not known"
    if not ranks:
        return f"{name}: each rank's part is finite, their sum is not"
    batches = "batch of rank" if len(ranks) == 1 else "batches of ranks"
    more = f" and {len(ranks) - _MAX_RANKS} more" if len(ranks) > _MAX_RANKS else ""
    return f"{name}: {batches} {', '.join(map(str, sorted(ranks)[:_MAX_RANKS]))}{more}"
