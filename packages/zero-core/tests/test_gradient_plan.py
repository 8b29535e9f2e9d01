import pytest
import torch

from zero_core.config import load_config
from zero_core.layout.arithmetic import Segment
from zero_core.layout.gradient_plan import GradientCase, plan_gradient

FP32, BF16 = torch.float32, torch.bfloat16
ADDED = {"owns_grads": True, "adds_grads": True, "is_accumulated": True}
"""A tier that adds up the gradients of micro-steps."""


def _plan(*, stage=3, world_size=2, communicated=BF16, asked=None, is_accumulated=False, **tier):
    given = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2 if is_accumulated else 1,
        "data_types": {"grad_accum_dtype": asked},
    }
    segment = Segment(0, 0, communicated, True, (), 64, world_size)
    tier = {"owns_grads": False, "adds_grads": False, **tier}
    return plan_gradient(segment, load_config(given, world_size=world_size), stage=stage, **tier)


ALONE = {"world_size": 1}
ASKED = {"asked": "fp32"}
NOTHING, SHARDS, FULL, BOTH = "", "shard", "full", "full and shard"


@pytest.mark.parametrize(
    ("given", "case", "kept", "dtypes"),
    [
        ({"stage": 0}, GradientCase.WHOLE_SUM, BOTH, (FP32, FP32)),
        ({"stage": 0, "communicated": FP32}, GradientCase.WHOLE_SUM, BOTH, (FP32, FP32)),
        ({"stage": 1, "communicated": FP32}, GradientCase.FULL_THEN_SHARD, BOTH, (FP32, FP32)),
        ({"stage": 2}, GradientCase.SHARD, SHARDS, (FP32, FP32)),
        ({"stage": 3}, GradientCase.SHARD, SHARDS, (FP32, FP32)),
        ({**ALONE, "stage": 0}, GradientCase.ALONE, SHARDS, (FP32, FP32)),
        ({**ALONE, "stage": 3}, GradientCase.ALONE, SHARDS, (FP32, FP32)),
        ({"stage": 0, "owns_grads": True}, GradientCase.WHOLE_SUM, BOTH, (FP32, BF16)),
        ({"stage": 1, "owns_grads": True}, GradientCase.PASS_ON, FULL, (FP32, BF16)),
        ({"stage": 2, "owns_grads": True}, GradientCase.PASS_ON, NOTHING, (FP32, BF16)),
        ({"stage": 3, "owns_grads": True}, GradientCase.PASS_ON, NOTHING, (FP32, BF16)),
        ({"owns_grads": True, "is_accumulated": True}, GradientCase.SHARD, SHARDS, (FP32, BF16)),
        ({**ALONE, "owns_grads": True}, GradientCase.PASS_ON, NOTHING, (FP32, BF16)),
        ({**ALONE, **ADDED, "adds_grads": False}, GradientCase.ALONE, SHARDS, (FP32, BF16)),
        # By default a tier accumulates in the communicated dtype.
        ({"stage": 0, **ADDED}, GradientCase.WHOLE_SUM, BOTH, (BF16, FP32)),
        ({"stage": 0, **ADDED, **ASKED}, GradientCase.WHOLE_SUM, BOTH, (FP32, FP32)),
        ({"stage": 1, **ADDED}, GradientCase.PASS_ON_EACH, FULL, (BF16, BF16)),
        ({"stage": 2, **ADDED}, GradientCase.PASS_ON_EACH, NOTHING, (BF16, BF16)),
        ({"stage": 2, **ADDED, **ASKED}, GradientCase.PASS_ON_EACH, NOTHING, (FP32, FP32)),
        ({**ADDED, "communicated": FP32}, GradientCase.PASS_ON_EACH, NOTHING, (FP32, FP32)),
        ({**ALONE, "stage": 0, **ADDED}, GradientCase.PASS_ON_EACH, NOTHING, (BF16, BF16)),
        ({**ADDED, "is_accumulated": False}, GradientCase.PASS_ON, NOTHING, (FP32, BF16)),
        # The configured ``grad_accum_dtype`` is narrower than the tier's sum.
        ({**ADDED, "asked": "bf16"}, GradientCase.SHARD, SHARDS, (BF16, BF16)),
    ],
    ids=str,
)
def test_gradients_are_kept_or_borrowed_rounded_and_offered_when(given, case, kept, dtypes):
    plan = _plan(**given)
    found = plan.case, plan.is_full_kept, plan.is_shard_kept
    assert found == (case, "full" in kept, "shard" in kept)
    assert (plan.rounded, plan.offered) == dtypes
    # The sum is in the gradient's memory if both have the same dtype.
    is_whole = case is GradientCase.WHOLE_SUM
    assert plan.is_sum_in_full == (is_whole and given.get("communicated") is FP32)
    # The norm of a tier's sums is computed in double precision.
    is_tiers = given.items() >= ADDED.items() and given.get("asked") != "bf16"
    assert plan.normed is (torch.float64 if is_tiers else None)
