"""Stages, recomputation and records do not change any bit of a training run.

Stages are compared with stage 0, which test_equivalence.py compares with DDP.
"""

import pytest
from support.rows import check

from zero_core.testing.equal import FOLDER, SCENARIOS, Row, Variant, cover

VARIANTS = {
    **{
        f"stage {stage}": Variant({"stage": stage}, base={"stage": 0}, stages=(0,), family="stage")
        for stage in (1, 2, 3)
    },
    "records its steps": Variant(top={"step_records": {"folder": FOLDER}}),
}
RECOMPUTATION = {
    name: Variant(top={"activation_checkpointing": block}, family="recomputation")
    for name, block in (
        ("recomputes blocks", {}),
        ("recomputes blocks from inputs on the host", {"cpu_checkpointing": True}),
    )
}
# Each unit is one chunk, so only one rank's tier has optimizer states.
CHUNKS = {"base": {"stage": 0}, "base_top": {"world_size_invariant": True}, "width": 11}
ALL = VARIANTS | RECOMPUTATION | {"stage 3 of chunks": Variant({"stage": 3}, **CHUNKS)}
PROGRAMS = [name for name in SCENARIOS if name != "recomputes"]


@pytest.mark.parametrize(
    "row",
    [
        *cover(VARIANTS, by_family=True),
        *cover(RECOMPUTATION, scenarios=PROGRAMS, by_family=True),
        Row("has edited gradients", "stage 3 of chunks", 0, "fp32", 2, 1),
    ],
    ids=str,
)
def test_a_variant_changes_no_bit(row, tmp_path):
    check(row, ALL[row.variant], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("row", cover(VARIANTS, strength=3), ids=str)
def test_any_three_settings_change_no_bit(row, tmp_path):
    check(row, VARIANTS[row.variant], tmp_path)
