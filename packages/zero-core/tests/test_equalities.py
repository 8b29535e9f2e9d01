"""Stages, recomputation and records do not change any bit of a training run.

The reference is the engine at stage 0, which test_equivalence.py compares with DDP.
"""

import pytest
from support.rows import check

from zero_core.testing.equal import FOLDER, SCENARIOS, Variant, cover

VARIANTS = {
    **{
        f"stage {stage}": Variant({"stage": stage}, base={"stage": 0}, stages=(0,), family="stage")
        for stage in (1, 2, 3)
    },
    "prefetches nothing": Variant({"stage3_prefetch_bucket_size": 0}, stages=(3,)),
    "records its steps": Variant(top={"step_records": {"folder": FOLDER}}),
}


RECOMPUTATION = {
    name: Variant(top={"activation_checkpointing": block}, family="recomputation")
    for name, block in (
        ("recomputes blocks", {}),
        ("recomputes blocks from inputs on the host", {"cpu_checkpointing": True}),
    )
}
ALL = VARIANTS | RECOMPUTATION
PROGRAMS = [name for name in SCENARIOS if name != "recomputes"]


@pytest.mark.parametrize(
    "row",
    [*cover(VARIANTS, by_family=True), *cover(RECOMPUTATION, scenarios=PROGRAMS, by_family=True)],
    ids=str,
)
def test_a_variant_changes_no_bit(row, tmp_path):
    check(row, ALL[row.variant], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("row", cover(VARIANTS, strength=3), ids=str)
def test_any_three_settings_change_no_bit(row, tmp_path):
    check(row, VARIANTS[row.variant], tmp_path)
