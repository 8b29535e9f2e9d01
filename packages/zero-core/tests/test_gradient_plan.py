"""The plan of a gradient's memory, as a table."""

import pytest
import torch

from zero_core.core.gradient_plan import GradientCase, plan_gradient

FP32, BF16 = torch.float32, torch.bfloat16
ADDED = {"owns_grads": True, "adds_grads": True, "is_accumulated": True}
"""Accumulation with a tier that adds up gradients."""


def _plan(**changed):
    given = {
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
def test_buffers_are_kept_or_borrowed_when(given, case, kept):
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
def test_a_gradient_has_the_dtypes_and_factor_of_its_plan(given, expected):
    plan = _plan(**given)
    assert {name: getattr(plan, name) for name in expected} == expected
    assert plan.normed == (torch.float64 if given.get("adds_grads") else None)
