"""Plan of the buffers that hold gradients from backward to the state tier, and of their dtypes.

See [Note: the tensors of a segment] in `zero_core.core.unit` for the buffers' names.

[Note: one sum for every stage and ratio]
A tier that can accumulate adds up the gradients of micro-steps in fp32 (float64 for float64). The
engine adds them up instead if the user chose a narrower dtype, or at stage 0 with several ranks,
where each rank's tier needs the whole sum. At stage 0 the engine first rounds each micro-step's
gradient, as for a tier. Norms of such sums are computed in float64, to be equal in both cases.

[Note: the same bits at any world size]
Micro-step k of rank r on W ranks is micro-batch k W + r of the step. The owner of a shard gets
every rank's gradient of the shard and adds them, in the order of ranks, to the sum of earlier
micro-steps. For every W this is the order of micro-batches. The loss is divided by the number of
micro-batches before backward, and each gradient is rounded to the communicated dtype. A missing
gradient is -0, which changes no bit of a sum. `zero_core.extensions.invariance` computes the sum
and its norms. No tier accumulates, because it would add the sum over ranks at once. The sum is in
``grad_shard``, even if a step has one micro-step, because with fewer ranks it has several.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from zero_core.config import DTYPES, Config
from zero_core.layout.arithmetic import Segment


class GradientCase(Enum):
    """Path of a gradient from backward to the state tier."""

    WHOLE_SUM = "whole sum"
    """Stage 0: ``full_grad`` is kept, reduced to ``grad_shard``, and all ranks' shards are gathered
    into ``grad_sum``, as every rank updates the whole segment."""
    FULL_THEN_SHARD = "full, then shard"
    """Stage 1: ``full_grad`` is kept, and reduced to ``grad_shard``."""
    SHARD = "shard"
    """Stages 2 and 3: ``full_grad`` is borrowed for one backward, and reduced to ``grad_shard``."""
    PASS_ON = "pass on"
    """The state tier owns gradients and a step has one micro-step. Gradients are reduced into
    borrowed memory and passed on to the tier at once. There is no ``grad_shard``."""
    PASS_ON_EACH = "pass on each"
    """`PASS_ON` for several micro-steps: the tier adds up their gradients, each rounded first."""
    ALONE = "alone"
    """One rank: ``grad_shard`` is ``full_grad``, and nothing is reduced."""


@dataclass(frozen=True)
class GradientPlan:
    """Buffers and dtypes of one segment's gradient."""

    case: GradientCase
    is_full_kept: bool  # whether ``full_grad`` is in the arena, not borrowed per backward
    is_sum_in_full: bool  # whether ``grad_sum`` uses the memory of ``full_grad``
    predivide: float  # factor on each rank's gradient before the reduction
    communicated: torch.dtype  # dtype of reductions
    communicated_sums: torch.dtype  # dtype of reductions of sums over several backwards
    accumulated: torch.dtype  # dtype in which reduced gradients accumulate
    rounded: torch.dtype  # dtype to which each micro-step's reduced gradient is rounded first
    offered: torch.dtype  # dtype of the gradients (or sums) offered to the state tier
    normed: torch.dtype | None  # dtype for sums of squares. None: the default
    # whether ranks' gradients are added one by one: [Note: the same bits at any world size]
    is_sequential: bool

    @property
    def is_passed_on_each(self) -> bool:
        """Whether the state tier adds up the micro-steps' gradients."""
        return self.case is GradientCase.PASS_ON_EACH

    @property
    def is_shard_kept(self) -> bool:
        return self.case not in (GradientCase.PASS_ON, GradientCase.PASS_ON_EACH)

    def small_slots(self, segment: Segment, *, is_cpu: bool) -> list[bool]:
        """Return whether each parameter's gradient is small and is added together with others.

        For a small gradient, a second read costs less than the launch of a separate kernel. A CPU
        copies small gradients and divides later, which pays only if a single pass divides all.
        """
        small = [slot.stop - slot.start <= 1 << (13 if is_cpu else 20) for slot in segment.slots]
        return small if not is_cpu or self.predivide == 1.0 or all(small) else [False] * len(small)

    def held_numel(self, segment: Segment) -> int:
        """Return with how many elements small gradients that wait are added, to limit memory."""
        return max(segment.padded_numel // 2, 1 << 16)


def plan_gradient(
    segment: Segment, config: Config, *, stage: int, owns_grads: bool, adds_grads: bool
) -> GradientPlan:
    """Plan the memory of a segment's gradient at ``stage`` (0 if there is nothing to shard).

    ``owns_grads``: the state tier copies offered gradients. ``adds_grads``: the tier can also
    accumulate the gradients of micro-steps.
    """
    communicated = communicated_dtype(segment, config)
    accumulated = accumulated_dtype(segment, config)
    has_peers = segment.world_size > 1
    is_sequential = config.world_size_invariant
    is_accumulated = config.gradient_accumulation_steps > 1 or is_sequential
    can_add = owns_grads and adds_grads and not is_sequential
    is_tiers = can_add and is_accumulated and accumulated.itemsize >= 4
    if is_tiers and not (has_peers and stage == 0):
        case = GradientCase.PASS_ON_EACH
    elif owns_grads and not is_accumulated and not (has_peers and stage == 0):
        case = GradientCase.PASS_ON
    elif not has_peers:
        case = GradientCase.ALONE
    elif stage == 0:
        case = GradientCase.WHOLE_SUM
    else:
        case = GradientCase.FULL_THEN_SHARD if stage == 1 else GradientCase.SHARD
    # By default the gradients that the tier adds up have the communicated dtype.
    is_rounded = is_tiers and config.data_types.grad_accum_dtype is None
    rounded = communicated if is_rounded else accumulated
    if is_tiers:
        offered = rounded if case is GradientCase.PASS_ON_EACH else accumulated
    else:
        offered = communicated if owns_grads else accumulated
    is_summed = config.gradient_allreduce_op == "sum"
    # By default sums over several backwards are sent in the accumulated dtype, without rounding.
    is_chosen = config.communication_data_type is not None
    return GradientPlan(
        case=case,
        is_full_kept=has_peers and stage < 2,
        is_sum_in_full=case is GradientCase.WHOLE_SUM and communicated == accumulated,
        predivide=1.0 if is_summed or is_sequential else 1.0 / segment.world_size,
        communicated=communicated,
        communicated_sums=communicated if is_chosen else accumulated,
        accumulated=accumulated,
        rounded=rounded,
        offered=offered,
        normed=torch.float64 if is_tiers else None,
        is_sequential=is_sequential,
    )


def communicated_dtype(segment: Segment, config: Config) -> torch.dtype:
    name = config.communication_data_type
    return segment.dtype if name is None else DTYPES[name]


def accumulated_dtype(segment: Segment, config: Config) -> torch.dtype:
    name = config.data_types.grad_accum_dtype
    return config.master_dtype(segment.dtype) if name is None else DTYPES[name]
