"""The plan of a gradient's memory, as a table, and flat gradients that follow it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero_core.layout.arithmetic import Segment, Slot
from zero_core.sharded.gradient_plan import GradientCase, GradientPlan, plan_gradient
from zero_core.sharded.grads import FlatGrads, GradientBuffers
from zero_core.sharded.params import SegmentViews
from zero_core.sharded.pool import BufferPool, allocator

FP32, BF16 = torch.float32, torch.bfloat16
ADDED = {"owns_grads": True, "adds_grads": True, "is_accumulated": True}
"""Accumulation with a tier that adds up gradients."""


def _plan(**changed: Any) -> GradientPlan:
    given: dict[str, Any] = {
        "stage": 3,
        "world_size": 2,
        "is_accumulated": False,
        "owns_grads": False,
        "adds_grads": False,
        "is_summed": False,
        "communicated": BF16,
        "accumulated": FP32,
        "is_communicated_given": False,
        "is_accumulated_given": False,
    }
    return plan_gradient(**{**given, **changed})


ALONE = {"world_size": 1}
NOTHING, SHARDS, FULL, BOTH = "", "shard", "full", "full and shard"


@pytest.mark.parametrize(
    ("given", "case", "kept"),
    [
        ({"stage": 0}, GradientCase.WHOLE_SUM, BOTH),
        ({"stage": 1}, GradientCase.FULL_THEN_SHARD, BOTH),
        ({"stage": 2}, GradientCase.SHARD, SHARDS),
        ({"stage": 3}, GradientCase.SHARD, SHARDS),
        ({"stage": 0, "owns_grads": True}, GradientCase.WHOLE_SUM, BOTH),
        ({"stage": 1, "owns_grads": True}, GradientCase.PASS_ON, FULL),
        ({"stage": 2, "owns_grads": True}, GradientCase.PASS_ON, NOTHING),
        ({"stage": 3, "owns_grads": True}, GradientCase.PASS_ON, NOTHING),
        ({"owns_grads": True, "is_accumulated": True}, GradientCase.SHARD, SHARDS),
        ({**ALONE, "stage": 0}, GradientCase.ALONE, SHARDS),
        ({**ALONE, "stage": 3}, GradientCase.ALONE, SHARDS),
        ({**ALONE, "owns_grads": True}, GradientCase.PASS_ON, NOTHING),
        ({**ALONE, "owns_grads": True, "is_accumulated": True}, GradientCase.ALONE, SHARDS),
        ({"stage": 0, **ADDED}, GradientCase.WHOLE_SUM, BOTH),
        ({"stage": 1, **ADDED}, GradientCase.PASS_ON_EACH, FULL),
        ({"stage": 2, **ADDED}, GradientCase.PASS_ON_EACH, NOTHING),
        ({"stage": 3, **ADDED}, GradientCase.PASS_ON_EACH, NOTHING),
        ({**ALONE, "stage": 0, **ADDED}, GradientCase.PASS_ON_EACH, NOTHING),
        ({**ADDED, "is_accumulated": False}, GradientCase.PASS_ON, NOTHING),
        # A narrower sum than the tier's is what the user asked for.
        ({**ADDED, "accumulated": BF16, "is_accumulated_given": True}, GradientCase.SHARD, SHARDS),
    ],
    ids=str,
)
def test_buffers_are_kept_or_borrowed_when(
    given: dict[str, Any], case: GradientCase, kept: str
) -> None:
    plan = _plan(**given)
    assert (plan.case, plan.is_full_kept, plan.is_shard_kept) == (
        case,
        "full" in kept,
        "shard" in kept,
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # The sum takes the memory of the gradient when dtypes agree.
        ({"stage": 0}, {"is_sum_in_full": False, "offered": FP32}),
        ({"stage": 0, "communicated": FP32}, {"is_sum_in_full": True, "offered": FP32}),
        ({"stage": 1, "communicated": FP32}, {"is_sum_in_full": False, "offered": FP32}),
        ({"stage": 0, "owns_grads": True}, {"is_sum_in_full": False, "offered": BF16}),
        ({"stage": 3, "owns_grads": True}, {"is_sum_in_full": False, "offered": BF16}),
        # A tier adds what is communicated unless the user says otherwise.
        ({}, {"rounded": FP32, "offered": FP32}),
        ({"owns_grads": True, "is_accumulated": True}, {"rounded": FP32, "offered": BF16}),
        ({"stage": 2, **ADDED}, {"rounded": BF16, "offered": BF16}),
        ({"stage": 0, **ADDED}, {"rounded": BF16, "offered": FP32}),  # the whole sum of such terms
        ({"stage": 0, "world_size": 1, **ADDED}, {"rounded": BF16, "offered": BF16}),
        ({"stage": 2, **ADDED, "is_accumulated_given": True}, {"rounded": FP32, "offered": FP32}),
        ({"stage": 0, **ADDED, "is_accumulated_given": True}, {"rounded": FP32, "offered": FP32}),
        ({"stage": 2, **ADDED, "communicated": FP32}, {"rounded": FP32, "offered": FP32}),
        # Gradients are divided by the ranks when their mean is asked for.
        ({"is_summed": False, "world_size": 4}, {"predivide": 0.25}),
        ({"is_summed": True, "world_size": 4}, {"predivide": 1.0}),
        ({"is_summed": False, "world_size": 1}, {"predivide": 1.0}),
    ],
    ids=str,
)
def test_a_gradient_has_the_dtypes_and_factor_of_its_plan(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    plan = _plan(**given)
    assert {name: getattr(plan, name) for name in expected} == expected
    assert plan.normed == (torch.float64 if given.get("adds_grads") else None)


def _segment(world_size: int) -> Segment:
    slots = (Slot(0, 0, 4), Slot(1, 4, 7))
    return Segment(0, 0, FP32, True, slots, shard_numel=-(-7 // world_size), world_size=world_size)


class _Mirror:
    """Rank 0's communicator in a group of two ranks whose gradients are equal."""

    def reduce_scatter(self, out: Tensor, full: Tensor, segment: int) -> Any:
        half = full[: out.numel()].to(out.dtype)
        out.copy_(half + half)
        return SimpleNamespace(
            wait=lambda: None,
            statistics=lambda: None,
            contributions=lambda: (half, half),
            acknowledge=lambda: None,
        )


class _Tier:
    """A state tier in which each gradient element equals its index."""

    def __init__(self, plan: GradientPlan) -> None:
        self.owns_grads = plan.case in (GradientCase.PASS_ON, GradientCase.PASS_ON_EACH)

    def read_grad(self, start: int, stop: int) -> Tensor:
        return torch.arange(start, stop).float()


def _grads(plan: GradientPlan) -> FlatGrads:
    segment = _segment(1 if plan.case is GradientCase.ALONE else 2)
    params = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(3))]
    dtypes = {plan.communicated, plan.accumulated}
    buffers = GradientBuffers(
        plan,
        None,
        torch.empty(segment.shard_numel) if plan.is_shard_kept else None,
        None,
        {d: BufferPool(allocator(torch.device("cpu")), 8 * d.itemsize) for d in dtypes},
        BufferPool(allocator(torch.device("cpu")), 4 * segment.shard_numel),
        BufferPool(allocator(torch.device("cpu")), 4 * segment.shard_numel),
    )
    views = SegmentViews(segment, params, torch.device("cpu"))
    tier: Any = _Tier(plan)
    return FlatGrads(segment, params, buffers, _Mirror(), tier, (0, 4), views)  # type: ignore[arg-type]


def _backward(grads: FlatGrads, first: float, second: float | None) -> None:
    grads.add(0, torch.full((2, 2), first))
    if second is not None:
        grads.add(1, torch.full((3,), second))
    grads.reduce()
    grads.finish()


def test_unreduced_gradients_add_up_in_the_accumulation_dtype() -> None:
    grads = _grads(_plan())
    grads.accumulate_locally()
    grads.add(0, torch.full((2, 2), 1.0))
    grads.add(0, torch.full((2, 2), 2.0**-10))  # lost in bf16
    assert grads.has_unreduced
    grads.reduce()
    grads.finish()
    assert not grads.has_unreduced
    assert grads.result().shard.tolist() == [1.0 + 2.0**-10] * 4


def test_a_gradient_is_refused_after_its_segment_was_updated() -> None:
    grads = _grads(_plan(communicated=FP32))
    _backward(grads, 1.0, 1.0)
    grads.mark_updated()
    with pytest.raises(RuntimeError, match="update_in_backward to false"):
        grads.add(0, torch.ones(2, 2))


def test_the_tier_is_asked_when_it_owns_what_was_offered() -> None:
    grads = _grads(_plan(communicated=FP32, owns_grads=True))
    _backward(grads, 1.0, 1.0)
    grads.result()
    grads.release(None)
    assert grads.values().tolist() == [0.0, 1.0, 2.0, 3.0]
    _backward(grads, 1.0, 1.0)  # a second backward of the step
    assert grads.result().shard.tolist() == [1.0, 2.0, 3.0, 4.0]


def test_each_micro_step_is_a_term_rounded_by_itself_for_a_tier_that_adds() -> None:
    grads = _grads(_plan(**ADDED))
    for value in (1.0, 2.0**-10, 3.0):
        _backward(grads, value, 1.0)
        result = grads.result()
        assert result.norm is None
        assert result.shard.dtype == BF16
        assert result.shard.tolist() == [value] * 4
        grads.release(None)


def test_a_gradient_that_was_set_is_the_whole_of_it() -> None:
    grads = _grads(_plan(**ADDED))
    grads.replace(1, torch.tensor([8.0, 2.0**-10]))
    result = grads.result()
    assert result.shard.tolist() == [0.0, 8.0, 2.0**-10, 3.0]
    assert result.norm is not None
    assert result.norm.item() == pytest.approx(73.0**0.5)


def test_the_whole_sum_of_stage_0_adds_what_the_tier_would() -> None:
    grads = _grads(_plan(**ADDED, communicated=FP32))
    summed = replace(grads.plan, case=GradientCase.SHARD, rounded=BF16, offered=FP32)
    grads = _grads(summed)
    _backward(grads, 1.0 + 2.0**-12, 1.0)
    _backward(grads, 2.0**-12, 1.0)
    assert grads.result().shard.tolist() == [1.0 + 2.0**-12] * 4
