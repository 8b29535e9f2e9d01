"""Memory of gradients: which buffers hold them from backward to the state tier, and in what dtype.

See [Note: the tensors of a segment] in `zero_core.core.unit` for the buffers' names.
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
    """The state tier owns gradients and a step has one micro-step: what is reduced is borrowed
    memory, passed on to the tier at once. There is no ``grad_shard``."""
    PASS_ON_EACH = "pass on each"
    """The state tier owns gradients and adds up those of a step's micro-steps: what each of them
    reduces is borrowed memory, rounded and passed on to the tier at once. There is no
    ``grad_shard``."""
    ALONE = "alone"
    """One rank: ``grad_shard`` is ``full_grad``, and nothing is reduced."""


@dataclass(frozen=True)
class GradientPlan:
    """Memory of one segment's gradient.

    Attributes:
        case: the way to the state tier.
        is_full_kept: whether ``full_grad`` is in the arena for good, not borrowed per backward.
        is_sum_in_full: whether ``grad_sum`` takes the memory of ``full_grad``.
        predivide: factor on each rank's gradient before it is reduced.
        communicated: dtype in which gradients are reduced.
        communicated_sums: dtype in which sums over several backwards (``no_sync``) are reduced.
        accumulated: dtype in which reduced gradients add up.
        rounded: dtype to which each micro-step's reduced gradient is rounded before that.
        offered: dtype in which the state tier gets them, each or their sum.
        normed: dtype in which the squares of the sum are added up; None for the usual one.
        is_sequential: whether every rank's gradient is a term by itself, as of one rank that
            computes all micro-batches: [Note: the same bits at any world size].
    """

    case: GradientCase
    is_full_kept: bool
    is_sum_in_full: bool
    predivide: float
    communicated: torch.dtype
    communicated_sums: torch.dtype
    accumulated: torch.dtype
    rounded: torch.dtype
    offered: torch.dtype
    normed: torch.dtype | None
    is_sequential: bool = False

    @property
    def is_passed_on_each(self) -> bool:
        """Whether the state tier adds up the micro-steps' gradients."""
        return self.case is GradientCase.PASS_ON_EACH

    @property
    def is_shard_kept(self) -> bool:
        """Whether ``grad_shard`` is in the arena."""
        return self.case not in (GradientCase.PASS_ON, GradientCase.PASS_ON_EACH)


def plan_gradient(
    *,
    stage: int,
    world_size: int,
    is_accumulated: bool,
    owns_grads: bool,
    adds_grads: bool,
    is_summed: bool,
    communicated: torch.dtype,
    accumulated: torch.dtype,
    is_communicated_given: bool,
    is_accumulated_given: bool,
    is_sequential: bool = False,
) -> GradientPlan:
    """Plan the memory of a gradient.

    Args:
        stage: 0 to 3: 0 where there is nothing to shard.
        world_size: number of ranks.
        is_accumulated: whether a step may have several micro-steps.
        owns_grads: whether the state tier copies what it is offered.
        adds_grads: whether it can add up the gradients of micro-steps, too.
        is_summed: whether the gradient is the ranks' sum, not their mean.
        communicated: see `GradientPlan`.
        accumulated: see `GradientPlan`.
        is_communicated_given: whether ``communicated`` is the user's choice. Otherwise sums over
            several backwards are reduced in ``accumulated``, and lose no bit.
        is_accumulated_given: whether ``accumulated`` is the user's choice. Otherwise a micro-step's
            gradient may be rounded to ``communicated`` before it is added.
        is_sequential: see `GradientPlan`.

    [Note: one sum for every stage and ratio]
    The sum that a tier takes is in fp32 (float64). Where the user asked for a narrower dtype, the
    engine adds up. At stage 0 with several ranks each rank's tier needs the whole sum: gathering it
    once per micro-step would cost more than it saves, so the engine adds up there, and rounds each
    term as it would for the tier. Norms of such sums are taken in double precision: then it does
    not matter which memory they are in.

    [Note: the same bits at any world size]
    Micro-step k of rank r on W ranks is micro-batch k W + r of the step. The owner of a shard has
    every rank's part and adds them to the sum of the micro-steps before, one after another: that is
    the order of micro-batches for every W. Each is divided by the number of micro-batches before
    backward, and rounded to the dtype that is sent. A missing one is -0, which changes no bit of a
    sum. `zero_core.extensions.invariance` has that sum and its norms.
    A tier would add the ranks' sum of a micro-step as one term: it adds nothing, and the sum
    is in ``grad_shard``, also where a step has one micro-step, as fewer ranks have several.
    """
    has_peers = world_size > 1
    is_tiers = owns_grads and adds_grads and is_accumulated and accumulated.itemsize >= 4
    is_tiers = is_tiers and not is_sequential
    is_accumulated = is_accumulated or is_sequential
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
    rounded = communicated if is_tiers and not is_accumulated_given else accumulated
    if is_tiers:
        offered = rounded if case is GradientCase.PASS_ON_EACH else accumulated
    else:
        offered = communicated if owns_grads else accumulated
    return GradientPlan(
        case=case,
        is_full_kept=has_peers and stage < 2,
        is_sum_in_full=case is GradientCase.WHOLE_SUM and communicated == accumulated,
        predivide=1.0 if is_summed or is_sequential else 1.0 / world_size,
        communicated=communicated,
        communicated_sums=communicated if is_communicated_given else accumulated,
        accumulated=accumulated,
        rounded=rounded,
        offered=offered,
        normed=torch.float64 if is_tiers else None,
        is_sequential=is_sequential,
    )


def plan_segment_gradient(
    segment: Segment, config: Config, *, stage: int, owns_grads: bool, adds_grads: bool
) -> GradientPlan:
    return plan_gradient(
        stage=stage,
        world_size=segment.world_size,
        is_accumulated=config.gradient_accumulation_steps > 1,
        owns_grads=owns_grads,
        adds_grads=adds_grads,
        is_summed=config.gradient_allreduce_op == "sum",
        communicated=communicated_dtype(segment, config),
        accumulated=accumulated_dtype(segment, config),
        is_communicated_given=config.communication_data_type is not None,
        is_accumulated_given=config.data_types.grad_accum_dtype is not None,
        is_sequential=config.world_size_invariant,
    )


def communicated_dtype(segment: Segment, config: Config) -> torch.dtype:
    name = config.communication_data_type
    return segment.dtype if name is None else DTYPES[name]


def accumulated_dtype(segment: Segment, config: Config) -> torch.dtype:
    name = config.data_types.grad_accum_dtype
    return config.master_dtype(segment.dtype) if name is None else DTYPES[name]
