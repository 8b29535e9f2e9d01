"""The gradient of one step, from the reduction of its segments to the decided update.

The runtime adds each segment's gradient when its reduction ends. The segment's statistics are kept
and the gradient is offered to the state tier. `agree` sums the statistics over all ranks, `decide`
makes a `StepDecision` of them, `apply` has the state tier carry it out.

[Note: optimizer in backward]
With ``update_in_backward`` a segment is updated as soon as its gradient is added: the host works on
one unit while the device still computes the one before. The update is exact and cannot be undone.
So it is done only where nothing later in the step may change a gradient or skip the step: without
clipping, without fp16's loss scale and without ``check_grad_overflow``. Whoever changes or drops
gradients after all gets an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero_core.comm.communicator import Communicator
from zero_core.comm.meter import FACTS, Meter
from zero_core.config import Config
from zero_core.layout.arithmetic import Layout
from zero_core.optim.train_state import TrainState
from zero_core.sharded.grads import FlatGrads
from zero_core.sharded.sharded_state import ShardedState

_MAX_NAMED = 3
_MAX_RANKS = 8


def updates_in_backward(config: Config) -> bool:
    """Whether units are updated in backward, as configured.

    By default: with optimizer offload and no clipping, fp16 or overflow check.
    """
    offload = config.zero_optimization.offload_optimizer
    if offload.update_in_backward is not None:
        return offload.update_in_backward
    return offload.device != "none" and not (
        config.gradient_clipping or config.fp16.enabled or config.check_grad_overflow
    )


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


class StepGradient:
    """Gradient of the current step.

    The first group of methods is the runtime's `zero_core.runtime.runtime.GradientSink`, which
    documents them.

    Attributes:
        params_with_grad: parameters that got a gradient on this rank since the last step.
        decision: on the last step, or None before the first.
    """

    def __init__(
        self,
        state: ShardedState,
        communicator: Communicator,
        train: TrainState,
        config: Config,
        meter: Meter,
    ) -> None:
        self.params_with_grad: set[int] = set()
        self.decision: StepDecision | None = None
        self._state = state
        self._tier = state.tier
        self._device = state.device
        self._communicator = communicator
        self._train = train
        self._config = config
        self._meter = meter
        spans = {flat.segment.index: flat.local_span for flat in state.params}
        self._starts = {index: span[0] for index, span in spans.items() if span is not None}
        self._pieces_of: dict[int, list[int]] = {}
        for number, piece in enumerate(state.pieces):
            self._pieces_of.setdefault(piece.segment, []).append(number)
        self._num_segments = sum(s.is_trainable for s in state.layout.segments)
        self._grads: dict[int, FlatGrads] = {}  # by segment
        self._square_sums: dict[int, Tensor] = {}  # by segment, of this step
        self._norm = 0.0  # loss scale included
        self._num_ranks_with_grad: list[float] = []  # by parameter
        self._clip_factor = 1.0  # of the calls of `clip` in this step
        self._is_updated_in_backward = updates_in_backward(config)
        self._updated: set[int] = set()  # pieces updated in backward in this step
        self._settings = ""  # that they were updated with

    # ------------------------------------------------------------------- sink

    @property
    def is_boundary(self) -> bool:
        return self._train.accumulation.is_boundary()

    @property
    def is_reduced(self) -> bool:
        return len(self._square_sums) == self._num_segments

    def begin_backward(self) -> None:
        self.check_not_updated("a further backward of the same step")
        if self._config.fp16.enabled and not self._train.scaler.is_applied:
            raise RuntimeError(
                "fp16 needs the loss scale: engine.backward(), or engine.scale(loss)"
            )

    def add(self, grads: FlatGrads) -> bool:
        index = grads.segment.index
        reduced = grads.result()
        self._square_sums[index] = reduced.norm.to(torch.float64).square()
        self._grads[index] = grads
        grads.release(self._tier.offer_grad(self._starts[index], reduced.shard))
        return self._is_updated_in_backward and self._update(grads)

    def broken(self) -> None:
        self._train.restart_step()
        self.check_not_updated("dropping gradients")

    def agree(self, *, has_unreduced: bool) -> bool:
        facts = torch.zeros(2 + len(self._state.layout.params), dtype=torch.float64)
        facts[0] = torch.stack(list(self._square_sums.values())).sum().cpu()
        facts[1] = float(has_unreduced)
        if self.params_with_grad:
            facts[2 + torch.tensor(sorted(self.params_with_grad))] = 1.0
        self._meter.add_all_reduce(FACTS, facts.nbytes)
        facts = self._state.control.sum(facts.to(self._device)).cpu()
        self._norm = math.sqrt(float(facts[0]))
        self._num_ranks_with_grad = facts[2:].tolist()
        return bool(facts[1] > 0)

    def clear(self) -> None:
        self.params_with_grad.clear()
        self._tier.discard_grads()
        self._square_sums.clear()
        self._updated.clear()
        self._settings = ""
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
            return self._norm
        state = self._state
        norms = [g.norm(p).to(self._device, torch.float64) for g in self._grads.values()]
        local = torch.linalg.vector_norm(torch.stack(norms), p)
        return float(torch.linalg.vector_norm(state.control.gather(local.view(1)), p))

    def explain_skip(self) -> str:
        """Name the parameters whose gradient is not finite, and the ranks whose batches did it.

        A segment in which several batches gave values that are not finite names them all. Also
        drop the collectives' quantization errors. Every rank must call it, before `clear`.
        """
        self._communicator.forget_errors()
        layout, control = self._state.layout, self._state.control
        own = [f for g in self._grads.values() for f in _nonfinite_params(g, layout, control.rank)]
        by_name: dict[str, set[int | None]] = {}
        for row in control.gather_bytes(json.dumps(own).encode()):
            for name, ranks in json.loads(row):
                by_name.setdefault(name, set()).update([None] if ranks is None else ranks)
        named = [_describe(name, ranks) for name, ranks in list(by_name.items())[:_MAX_NAMED]]
        if len(by_name) > len(named):
            named.append(f"and {len(by_name) - len(named)} more")
        return "; ".join(named) or "no element by itself, their norm overflows"

    # ------------------------------------------------------------------- step

    def decide(self) -> StepDecision:
        """Decide on the step from what `agree` found."""
        used, scale = self._num_ranks_with_grad, self._train.scaler.scale
        norm = self._norm / scale
        clipped = norm * self._clip_factor
        factor = self._clip_factor * clip_factor(clipped, self._config.gradient_clipping)
        is_checked = self._config.check_grad_overflow or self._config.fp16.enabled
        self.decision = StepDecision(
            norm=norm,
            is_taken=math.isfinite(norm) or not is_checked,
            active=[i for i, p in enumerate(self._state.pieces) if used[p.param] > 0],
            grad_scale=factor / scale,
        )
        self._train.grad_norm = norm
        return self.decision

    def apply(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Have the state tier update what the decision says, with the settings of ``groups``.

        Raises:
            RuntimeError: units were updated in backward with other settings.
        """
        assert self.decision is not None, "the engine decides first"
        if self._updated and repr(groups) != self._settings:
            self.check_not_updated("changing the optimizer's settings between backward and step")
        active = [i for i in self.decision.active if i not in self._updated]
        self._tier.step(groups, active, grad_scale=self.decision.grad_scale)

    # -------------------------------------------------- optimizer in backward

    def _update(self, grads: FlatGrads) -> bool:
        """Update a segment's parameters that have a gradient here.

        A parameter without a gradient here waits for ``step``: only then is it known whether
        another rank has one.
        """
        pieces = self._state.pieces
        own = self._pieces_of.get(grads.segment.index, ())
        active = [i for i in own if pieces[i].param in self.params_with_grad]
        if active:
            groups = self._train.hyperparameters()
            self._settings = self._settings or repr(groups)
            self._tier.step(groups, active, grad_scale=1.0)
            grads.mark_updated()
            self._updated.update(active)
        return bool(active)

    def check_not_updated(self, what: str) -> None:
        """Raise if units were updated in backward already: ``what`` is possible only before."""
        if self._updated:
            raise RuntimeError(
                f"{what}: too late, units have been updated during backward, as there is no "
                "clipping and check_grad_overflow is false. Set "
                "zero_optimization.offload_optimizer.update_in_backward to false; a step that "
                "broke off midway can only be repeated from a checkpoint"
            )


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor that brings a gradient's ``norm`` down to ``max_norm``, 1 if that is 0.

    The formula of `torch.nn.utils.clip_grad_norm_`, with its epsilon of 1e-6.
    """
    if max_norm <= 0.0 or not math.isfinite(norm):
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))


def _nonfinite_params(
    grads: FlatGrads, layout: Layout, rank: int
) -> list[tuple[str, list[int] | None]]:
    """Return the parameters of this rank's shard that are not finite, with the ranks at fault."""
    bad = torch.nonzero(~torch.isfinite(grads.values())).flatten()
    if not bad.numel():
        return []
    low, _ = grads.segment.shard_range(rank)
    at = bad.cpu() + low
    ranks = grads.nonfinite_ranks()
    return [
        (layout.params[slot.param].name, ranks)
        for slot in grads.segment.slots
        if bool(((at >= slot.start) & (at < slot.stop)).any())
    ]


def _describe(name: str, ranks: set[int | None]) -> str:
    known = sorted(rank for rank in ranks if rank is not None)
    if not known and None in ranks:
        return f"{name}: which rank's batch did it is not known"
    if not known:
        return f"{name}: each rank's part is finite, their sum is not"
    batches = "batch of rank" if len(known) == 1 else "batches of ranks"
    more = f" and {len(known) - _MAX_RANKS} more" if len(known) > _MAX_RANKS else ""
    return f"{name}: {batches} {', '.join(map(str, known[:_MAX_RANKS]))}{more}"
