"""Memory of gradients: which buffers hold them from backward to the state tier, and in what dtype.

See [Note: the tensors of a segment] in `zero_core.sharded.unit` for the buffers' names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from zero_core.config import DTYPES, Config
from zero_core.layout.arithmetic import Segment


class GradientCase(Enum):
    """Way of a gradient from backward to the state tier."""

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
        accumulated: dtype in which reduced gradients add up.
        offered: dtype in which the state tier gets them.
    """

    case: GradientCase
    is_full_kept: bool
    is_sum_in_full: bool
    predivide: float
    communicated: torch.dtype
    accumulated: torch.dtype
    offered: torch.dtype

    @property
    def is_shard_kept(self) -> bool:
        """Whether ``grad_shard`` is in the arena."""
        return self.case is not GradientCase.PASS_ON


def plan_gradient(
    *,
    stage: int,
    world_size: int,
    is_accumulated: bool,
    owns_grads: bool,
    is_summed: bool,
    communicated: torch.dtype,
    accumulated: torch.dtype,
) -> GradientPlan:
    """Plan the memory of a gradient.

    Args:
        stage: the stage that makes a difference, 0 to 3.
        world_size: number of ranks.
        is_accumulated: whether a step may have several micro-steps.
        owns_grads: whether the state tier copies what it is offered.
        is_summed: whether the gradient is the ranks' sum, not their mean.
        communicated: see `GradientPlan`.
        accumulated: see `GradientPlan`.
    """
    has_peers = world_size > 1
    if owns_grads and not is_accumulated and not (has_peers and stage == 0):
        case = GradientCase.PASS_ON
    elif not has_peers:
        case = GradientCase.ALONE
    elif stage == 0:
        case = GradientCase.WHOLE_SUM
    else:
        case = GradientCase.FULL_THEN_SHARD if stage == 1 else GradientCase.SHARD
    return GradientPlan(
        case=case,
        is_full_kept=has_peers and stage < 2,
        is_sum_in_full=case is GradientCase.WHOLE_SUM and communicated == accumulated,
        predivide=1.0 if is_summed else 1.0 / world_size,
        communicated=communicated,
        accumulated=accumulated,
        offered=communicated if owns_grads else accumulated,
    )


def plan_segment_gradient(
    segment: Segment, config: Config, *, stage: int, owns_grads: bool
) -> GradientPlan:
    return plan_gradient(
        stage=stage,
        world_size=segment.world_size,
        is_accumulated=config.gradient_accumulation_steps > 1,
        owns_grads=owns_grads,
        is_summed=config.gradient_allreduce_op == "sum",
        communicated=communicated_dtype(segment, config),
        accumulated=accumulated_dtype(segment, config),
    )


def communicated_dtype(segment: Segment, config: Config) -> torch.dtype:
    name = config.communication_data_type
    return segment.dtype if name is None else DTYPES[name]


def accumulated_dtype(segment: Segment, config: Config) -> torch.dtype:
    name = config.data_types.grad_accum_dtype
    if name is not None:
        return DTYPES[name]
    return torch.float64 if segment.dtype == torch.float64 else torch.float32


def offered_dtype(segment: Segment, config: Config, *, owns_grads: bool) -> torch.dtype:
    return plan_segment_gradient(segment, config, stage=0, owns_grads=owns_grads).offered
