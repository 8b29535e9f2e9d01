"""The gradient of one step, from the reduction of its segments to the decided update.

The runtime adds each segment's gradient when its reduction ends. The segment's statistics are kept
and the gradient is offered to the state tier. `agree` sums the statistics over all ranks, `decide`
makes a `StepDecision` of them, `apply` has the state tier carry it out.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero_core._torch import find_trainable, get_grad, set_grad
from zero_core.comm.communicator import Communicator
from zero_core.comm.control import ControlGroup
from zero_core.config import Config
from zero_core.core.extension import Extensions
from zero_core.core.facts import NUM_WORDS, Facts, Filler
from zero_core.core.grads import Arithmetic, FlatGrads
from zero_core.errors import RankMismatchError
from zero_core.layout.arithmetic import Layout
from zero_core.optim.train_state import TrainState, describe_groups
from zero_core.protocols import AccumulatingTier
from zero_core.sharded.sharded_state import ShardedState
from zero_core.step.param_grads import SHARDED, UPDATED_IN_BACKWARD, ParamGrads
from zero_core.step.update import choose_policy

CLIP_EPSILON = 1e-6
"""Of `torch.nn.utils.clip_grad_norm_`."""
_CHANGED = "param.grad was changed to values that are not finite"
_MAX_NAMED = 3
_MAX_RANKS = 8


@dataclass(frozen=True)
class StepDecision:
    """The same on all ranks, but for ``active``.

    Attributes:
        norm: 2-norm of the gradient, unscaled, before clipping.
        is_taken: whether the step is taken; otherwise it is skipped.
        active: this rank's pieces to be updated, sorted.
        grad_scale: factor on the gradient that unscales and clips it.
    """

    norm: float
    is_taken: bool
    active: list[int]
    grad_scale: float


class StepAgreement:
    """Optimizer's groups, trainable parameters, buffers, accumulation, changes of one rank.

    A step sums a hash of them and its square over the ranks, in the reduction that it makes
    anyway: all ``n`` ranks have the same ``h`` if and only if ``n * sum(h * h) == sum(h) ** 2``.
    Sums of 16-bit numbers and their squares are exact in float64, for up to 2**21 ranks. The two
    products are not, but are rounded alike where they are equal.
    """

    def __init__(self, state: ShardedState, train: TrainState) -> None:
        self._buffers = state.common_buffers
        self._control = state.control
        self._train = train
        self._names = state.param_names
        self._params = [p for f in state.params if f.segment.is_trainable for p in f.params]
        self._hashed: Any = None
        self._words = [0.0] * NUM_WORDS
        self._changed: Sequence[str] = ()

    def words(self, changed: Sequence[str]) -> list[float]:
        """Return this rank's hash: `NUM_WORDS` integers below 2**16.

        ``changed`` names the units of which ``param.grad`` was changed.
        """
        self._changed = changed
        facts = (
            describe_groups(self._train.hyperparameters()),
            find_trainable(self._params),
            self._buffers.describe(),
            self._train.accumulation.steps,
            self._train.scaler.scale,
            changed,
        )
        if facts != self._hashed:  # the hash takes longer than the comparison
            self._hashed = facts
            digest = hashlib.sha256(repr(facts).encode()).digest()
            pairs = (digest[2 * i : 2 * i + 2] for i in range(NUM_WORDS))
            self._words = [float(int.from_bytes(pair, "big")) for pair in pairs]
        return self._words

    def confirm(self) -> None:
        """Go on with what was hashed last: all ranks have the same."""
        self._buffers.confirm()

    def refuse(self, step: int) -> None:
        """Raise, on all ranks, with what differs in step number ``step``. All must call it.

        Raises:
            RankMismatchError: always.
        """
        facts = describe_groups(self._train.hyperparameters())
        for param in self._params:
            facts[f"parameter {self._names[id(param)]}"] = (
                "trainable" if param.requires_grad else "frozen"
            )
        facts |= self._buffers.describe()
        facts["gradient_accumulation_steps"] = str(self._train.accumulation.steps)
        facts["loss scale"] = str(self._train.scaler.scale)
        facts["changes"] = ", ".join(self._changed) or "none"
        found = self._control.differences(facts)
        raise RankMismatchError(
            f"rank {self._control.rank}, step {step}: not updated, as ranks differ in {found}. "
            "Every rank must set the same: a schedule that follows the loss needs the mean over "
            "all ranks"
        )


class StepGradient:
    """Gradient of the current step.

    The first group of methods is the runtime's `zero_core.core.passes.GradientSink`, which
    documents them.

    Attributes:
        params_with_grad: parameters that got a gradient on this rank since the last step.
        decision: on the last step, or None before the first.
        param_grads: gives the gradient out as ``param.grad``, if it serves.
        facts: what all ranks know of the step, after `agree`.
        policy: when the tier updates.
    """

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
        self.params_with_grad: set[int] = set()
        self.decision: StepDecision | None = None
        self._state = state
        self._tier = tier = state.tier
        # Once, not for each segment: the check of a protocol reads all of its names.
        self._accumulating_tier = tier if isinstance(tier, AccumulatingTier) else None
        self._device = state.device
        self._communicator = communicator
        self._train = train
        self._config = config
        self._arithmetic = arithmetic
        self._is_scaled = config.loss_scaling.enabled
        self._is_checked = config.check_grad_overflow or self._is_scaled
        self.facts = facts
        self._agreement = StepAgreement(state, train)
        self._is_agreed = False  # the statistics are those of the gradient as it was reduced
        self._changed_square_sum: Tensor | None = None  # with the changes made to param.grad
        self._why_skipped = _CHANGED
        spans = {flat.segment.index: flat.source.span for flat in state.params}
        self._starts = {index: span[0] for index, span in spans.items() if span is not None}
        # Trained parameters that are whole here, by number.
        self._whole_params = [
            (slot.param, param)
            for flat in state.params
            if flat.is_kept and flat.segment.is_trainable
            for slot, param in zip(flat.segment.slots, flat.params, strict=True)
        ]
        self._pieces_of: dict[int, list[int]] = {}
        for number, piece in enumerate(state.pieces):
            self._pieces_of.setdefault(piece.segment, []).append(number)
        self._num_segments = sum(s.is_trainable for s in state.layout.segments)
        self._grads: dict[int, FlatGrads] = {}  # by segment
        self._norms: dict[int, Tensor] = {}  # by segment, of this step
        # Square sums of gradients that the tier adds up, which it computes beside backward.
        self._tier_sums: dict[int, Callable[[], Tensor]] = {}
        self._clip_factor = 1.0  # of the calls of `clip` in this step
        self.policy = choose_policy(tier, train, config, rank=state.control.rank)
        self.param_grads = ParamGrads(
            state.params,
            self.params_with_grad,
            owns_grads=state.tier.owns_grads,
            why_none=SHARDED
            if config.zero_optimization.stage
            else UPDATED_IN_BACKWARD * self.policy.is_final,
        )

    # ------------------------------------------------------------------- sink

    @property
    def is_boundary(self) -> bool:
        return self._train.accumulation.is_boundary()

    @property
    def is_reduced(self) -> bool:
        return len(self._norms) + len(self._tier_sums) == self._num_segments

    def begin_backward(self, *, is_new_round: bool) -> None:
        changes = self.param_grads.note_changes(is_agreed=False)
        if self._communicator.world_size > 1:  # others may still read this rank's shards
            self.param_grads.keep_changes(changes)
        else:
            self._take_changes(changes)
        self.param_grads.close()
        self.reopen()
        if self.policy.begins_early:
            self.policy.check_unused("a further backward of the same step")
            for before in self._extensions.before_early_update:
                before()
        if self._is_scaled and not self._train.scaler.is_applied:
            raise RuntimeError(
                "Loss scaling is required in fp16: call engine.backward(loss), or "
                "engine.scale(loss).backward()"
            )
        for follow in self._extensions.begin_backward:
            follow(is_new=is_new_round)

    def reopen(self) -> None:
        self._is_agreed = False
        self._changed_square_sum = None

    def add(self, grads: FlatGrads, *, is_last: bool) -> bool:
        self.reopen()
        index = grads.segment.index
        reduced = grads.result()
        self._grads[index] = grads
        self._tier_sums.pop(index, None)
        self._norms.pop(index, None)
        if is_last:
            self.param_grads.open(grads)
        if reduced.norm is None:
            return self._add_to_tier(grads, reduced.shard, is_last=is_last)
        self._norms[index] = reduced.norm
        if self.policy.is_final:
            grads.wait()
        grads.shard.release(self._tier.offer_grad(self._starts[index], reduced.shard))
        return self._reduced(grads)

    def _add_to_tier(self, grads: FlatGrads, shard: Tensor, *, is_last: bool) -> bool:
        """Have the tier add one micro-step's gradient. Its norm is asked for with the last one."""
        tier, index = self._accumulating_tier, grads.segment.index
        assert tier is not None, "so it was planned"
        start = self._starts[index]
        grads.shard.release(tier.add_grad(start, shard, is_last=is_last))
        if not is_last:
            return False
        self._tier_sums[index] = tier.square_sum(start, start + shard.numel())
        return self._reduced(grads)

    def broken(self) -> None:
        self._train.restart_step()
        self.policy.check_unused("dropping gradients")

    def drop_untaken(self) -> bool:
        left = [
            param
            for flat in self._state.params
            if flat.segment.is_trainable
            for param in flat.shown.read_params
            if get_grad(param) is not None and not self.param_grads.is_assigned(param)
        ]
        for param in left:
            set_grad(param, None)
        return bool(left)

    def agree(self, filler: Filler) -> None:
        self.param_grads.take_assigned()
        changes = self.param_grads.note_changes(is_agreed=self._is_agreed)
        if not self._is_agreed:
            # Before the exchange: after it, no rank reads another's gradient any more.
            for grads in self._grads.values():
                grads.wait()
            self.facts.start_sum((self, filler), self._square_sums(self._norms))
            self._is_agreed = True
        if self._take_changes(changes):
            norms = self._norms
            if self._communicator.world_size > 1:
                norms = {index: self._grads[index].covered_norm() for index in norms}
            square_sums = self._square_sums(norms)
            self._arithmetic.finish(square_sums)
            self._changed_square_sum = square_sums[0]

    def fill(self, facts: Facts) -> None:
        """Put in what this rank has used and written, and a hash of what must be equal."""
        facts.put("with gradient", bool(self.params_with_grad))
        facts.mark("used", self.params_with_grad)
        changed = self.param_grads.begin_agreement(self._communicator)
        facts.put_hash(self._agreement.words(changed))
        for fill in self._extensions.fill:
            fill(facts)

    def _square_sums(self, norms: Mapping[int, Tensor]) -> Tensor:
        """Return the sums of the squares of ``norms``, by segment, as the statistics take them."""
        # In the order of the layout: that of the reductions may change from step to step.
        ordered = [norm for _, norm in sorted(norms.items())]
        squares = [self._on_device(call()).view(1) for _, call in sorted(self._tier_sums.items())]
        return self._arithmetic.add_squares(ordered, squares)

    def _take_changes(self, changes: Mapping[int, Mapping[int, Tensor]]) -> bool:
        """Have the step use what was done to ``param.grad``. Return whether anything was."""
        changed = self.param_grads.take_changes(changes)
        for grads in changed:
            index = grads.segment.index
            if self._tier.owns_grads:
                reduced = grads.changed_result()
                self._tier_sums.pop(index, None)
                grads.shard.release(self._tier.offer_grad(self._starts[index], reduced.shard))
                assert reduced.norm is not None, "it is the whole gradient"
                self._norms[index] = reduced.norm
            else:  # it reads the memory that was changed
                self._norms[index] = grads.retake_norm()
        return bool(changed)

    def _on_device(self, value: Tensor) -> Tensor:
        """Move a number to the device, without waiting for it."""
        if value.device == self._device:
            return value
        return torch.full((), value.item(), dtype=value.dtype, device=self._device)

    def void_update(self) -> None:
        self.policy.settle(is_void=True)

    def clear(self) -> None:
        if self.policy.is_ahead:  # the step was broken off
            is_void = (
                self.facts.is_any("unreduced")
                or self.facts.is_any("written")
                or not self.facts.is_hash_agreed
                or not self._is_to_be_taken(self._norm())
            )
            self.policy.settle(is_void=is_void)
        self.reopen()
        self._why_skipped = _CHANGED
        self.param_grads.clear()
        self.params_with_grad.clear()
        self._tier.discard_grads()
        self._train.num_drops += 1
        self._norms.clear()
        self._tier_sums.clear()
        self.policy.clear()
        self._clip_factor = 1.0

    # ----------------------------------------- between the last backward and the step

    @property
    def factor(self) -> float:
        """The factor that brings gradients to their true scale, clipped so far."""
        return self._clip_factor / self._train.scaler.scale

    def grads_of(self, segment: int) -> FlatGrads:
        """Return the reduced gradient of a segment, after `agree`."""
        return self._grads[segment]

    def clip(self, max_norm: float, p: float) -> float:
        """Clip by the ``p``-norm, after `agree`, and return the norm before, unscaled.

        Every rank must call it.
        """
        norm = self.factor * self._p_norm(p)
        self._clip_factor *= clip_factor(norm, max_norm)
        return norm

    def _p_norm(self, p: float) -> float:
        if p == 2.0:
            return math.sqrt(self._square_sum)
        grads = [grads for _, grads in sorted(self._grads.items())]
        norms = [g.norm(p).to(self._device, torch.float64) for g in grads]
        return self._arithmetic.over_ranks(norms, p, self._state.control)

    def explain_skip(self) -> str:
        """Return why `decide` skips the step, before `clear`.

        It names the parameters whose gradient is not finite, and the ranks whose batches did it. A
        segment in which several batches gave values that are not finite names them all.
        """
        return self._why_skipped

    def _explain_nonfinite(self) -> str:
        """Find what `explain_skip` returns. Every rank must call it.

        Also drop the collectives' quantization errors.
        """
        self._communicator.forget_errors()
        layout, control = self._state.layout, self._state.control
        found = {index: g.nonfinite_ranks() for index, g in self._grads.items()}
        own = {
            "names": [
                n for g in self._grads.values() for n in _nonfinite_params(g, layout, control)
            ],
            "ranks": [(index, ranks) for index, ranks in found.items() if ranks is not None],
        }
        rows = [json.loads(row) for row in control.gather_bytes(json.dumps(own).encode())]
        # What was not finite in a segment may have been seen by other ranks than it belongs to.
        by_segment: dict[int, set[int]] = {}
        for index, ranks in (pair for row in rows for pair in row["ranks"]):
            by_segment.setdefault(index, set()).update(ranks)
        by_name = {name: by_segment.get(index) for row in rows for name, index in row["names"]}
        named = [_describe(name, ranks) for name, ranks in list(by_name.items())[:_MAX_NAMED]]
        if len(by_name) > len(named):
            named.append(f"and {len(by_name) - len(named)} more")
        return "; ".join(named) or "no element by itself, their norm overflows"

    # ------------------------------------------------------------------- step

    def update_ahead(self) -> None:
        """Enqueue the update, if that can be done before the host knows the decision.

        It follows `agree`.
        """
        self.param_grads.close()
        if self.facts.is_known or not self.policy.can_step_ahead:
            return
        pieces = enumerate(self._state.pieces)
        active = [i for i, piece in pieces if piece.param in self.params_with_grad]
        if active:
            grad_scale, found_inf = self._decide_on_device()
            self.policy.step_ahead(active, grad_scale=grad_scale, found_inf=found_inf)

    def _decide_on_device(self) -> tuple[Tensor | float, Tensor]:
        """Return the factor on the gradient and whether nothing is to be updated, on the device.

        The operations of `decide`, in float64 and between tensors, give its bits. Torch divides by
        a number by multiplying with its inverse.
        """
        square_sum = self._changed_square_sum
        if square_sum is None:
            square_sum = self.facts.device_square_sum
        scale = torch.full_like(square_sum, self._train.scaler.scale)
        norm = square_sum.sqrt() / scale
        is_void = self.facts.device_is_void
        if self._is_checked:
            is_void = is_void | ~torch.isfinite(norm)
        found_inf = is_void.to(torch.float32)
        max_norm = self._config.gradient_clipping
        if max_norm == 0.0 and self._clip_factor == self._train.scaler.scale == 1.0:
            return 1.0, found_inf
        factor = torch.full_like(norm, self._clip_factor)
        if max_norm > 0.0:
            clipped = norm * factor
            limit = (torch.full_like(norm, max_norm) / (clipped + CLIP_EPSILON)).clamp(max=1.0)
            factor = factor * torch.where(torch.isfinite(clipped), limit, 1.0)
        return torch.where(is_void, 1.0, factor / scale), found_inf

    def decide(self) -> StepDecision:
        """Decide on the step from what `agree` found.

        Raises:
            RankMismatchError: ranks differ in what must be equal. Nothing was updated, except in
                backward.
        """
        if not self.facts.is_hash_agreed:
            self.policy.settle(is_void=True)
            self.reopen()  # ranks may set the same and call step() again
            self.param_grads.forget_last_changes()
            self._agreement.refuse(self._train.global_steps + 1)
        self._agreement.confirm()
        if self.facts.is_any("written"):
            self.policy.settle(is_void=True)
        for follow in self._extensions.before_decision:
            follow(self._train.global_steps + 1)
        self.param_grads.decided()
        used, scale = self.facts.counts("used"), self._train.scaler.scale
        for param in self.param_grads.set_params:  # since the ranks were counted
            used[param] = float(param in self.params_with_grad)
        norm = self._norm()
        clipped = norm * self._clip_factor
        factor = self._clip_factor * clip_factor(clipped, self._config.gradient_clipping)
        self.decision = StepDecision(
            norm=norm,
            is_taken=self._is_to_be_taken(norm),
            active=[i for i, p in enumerate(self._state.pieces) if used[p.param] > 0],
            grad_scale=factor / scale,
        )
        self.policy.settle(is_void=not self.decision.is_taken)
        if self._is_checked and not math.isfinite(self.facts.square_sum):
            # On all ranks, also where a change of param.grad has mended it.
            self._why_skipped = self._explain_nonfinite()
        self._train.grad_norm = norm
        return self.decision

    @property
    def _square_sum(self) -> float:
        if self._changed_square_sum is not None:
            return self._changed_square_sum.item()
        return self.facts.square_sum

    def _norm(self) -> float:
        return math.sqrt(self._square_sum) / self._train.scaler.scale

    def _is_to_be_taken(self, norm: float) -> bool:
        return math.isfinite(norm) or not self._is_checked

    def apply(self) -> None:
        """Have the state tier update what the decision says.

        Raises:
            RuntimeError: units were updated in backward with other settings.
        """
        assert self.decision is not None, "the engine decides first"
        self.policy.step(self.decision.active, grad_scale=self.decision.grad_scale)
        if self._whole_params:
            # As of an optimizer's update in place: a backward of a forward before it is refused.
            used = self.facts.counts("used")
            updated = [param for number, param in self._whole_params if used[number]]
            torch.autograd.graph.increment_version(updated)

    def _reduced(self, grads: FlatGrads) -> bool:
        """Offer the policy a segment's parameters that have a gradient here.

        A parameter without one waits for ``step``: only then is it known whether another rank has
        one. Returns whether they have new values.
        """
        if not self.policy.begins_early:
            return False
        pieces = self._state.pieces
        own = self._pieces_of.get(grads.segment.index, ())
        active = [i for i in own if pieces[i].param in self.params_with_grad]
        is_updated = self.policy.reduced(active, grad_scale=self.factor)
        if is_updated:
            grads.mark_updated()
        return is_updated


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor that brings a gradient's ``norm`` down to ``max_norm``, 1 if that is 0.

    The formula of `torch.nn.utils.clip_grad_norm_`.
    """
    if max_norm <= 0.0 or not math.isfinite(norm):
        return 1.0
    return min(1.0, max_norm / (norm + CLIP_EPSILON))


def _nonfinite_params(
    grads: FlatGrads, layout: Layout, control: ControlGroup
) -> list[tuple[str, int]]:
    """Return the parameters of this rank's shard that are not finite, with their segment."""
    bad = torch.nonzero(~torch.isfinite(grads.values())).flatten()
    if not bad.numel():
        return []
    segment = grads.segment
    low, _ = segment.shard_range(control.rank)
    at = bad.cpu() + low
    return [
        (layout.params[slot.param].name, segment.index)
        for slot in segment.slots
        if bool(((at >= slot.start) & (at < slot.stop)).any())
    ]


def _describe(name: str, ranks: set[int] | None) -> str:
    if ranks is None:
        return f"{name}: which rank's batch did it is not known"
    if not ranks:
        return f"{name}: each rank's part is finite, their sum is not"
    batches = "batch of rank" if len(ranks) == 1 else "batches of ranks"
    more = f" and {len(ranks) - _MAX_RANKS} more" if len(ranks) > _MAX_RANKS else ""
    return f"{name}: {batches} {', '.join(map(str, sorted(ranks)[:_MAX_RANKS]))}{more}"
