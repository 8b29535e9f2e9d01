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
        # What the engine keeps by itself is in test_plan.py, as closed forms.
        ({"stage": 0, "owns_grads": True}, GradientCase.WHOLE_SUM, BOTH),
        ({"stage": 1, "owns_grads": True}, GradientCase.PASS_ON, FULL),
        ({"stage": 2, "owns_grads": True}, GradientCase.PASS_ON, NOTHING),
        ({"stage": 3, "owns_grads": True}, GradientCase.PASS_ON, NOTHING),
        ({"owns_grads": True, "is_accumulated": True}, GradientCase.SHARD, SHARDS),
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
    found = plan.case, plan.is_full_kept, plan.is_shard_kept
    assert found == (case, "full" in kept, "shard" in kept)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # A tier adds what is communicated unless the user says otherwise.
        ({}, (FP32, FP32)),
        ({"stage": 0, "owns_grads": True}, (FP32, BF16)),
        ({"owns_grads": True, "is_accumulated": True}, (FP32, BF16)),
        ({"stage": 2, **ADDED}, (BF16, BF16)),
        ({"stage": 0, **ADDED}, (BF16, FP32)),  # the whole sum of such terms
        ({**ALONE, "stage": 0, **ADDED}, (BF16, BF16)),
        ({"stage": 2, **ADDED, "is_accumulated_given": True}, (FP32, FP32)),
        ({"stage": 0, **ADDED, "is_accumulated_given": True}, (FP32, FP32)),
        ({"stage": 2, **ADDED, "communicated": FP32}, (FP32, FP32)),
    ],
    ids=str,
)
def test_a_micro_step_is_rounded_and_offered_in_the_dtypes_of_its_plan(given, expected):
    plan = _plan(**given)
    assert (plan.rounded, plan.offered) == expected
    assert plan.normed == (torch.float64 if given.get("adds_grads") else None)
