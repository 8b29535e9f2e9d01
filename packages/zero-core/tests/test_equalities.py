"""A stage changes no bit, nor do records of the steps, whatever the program does with the engine.

The oracle is the engine at stage 0, which test_equivalence.py compares with DDP.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_core.testing.equal import FOLDER, Row, Variant, check, cover

VARIANTS = {
    **{
        f"stage {stage}": Variant({"stage": stage}, base={"stage": 0}, stages=(0,), family="stage")
        for stage in (1, 2, 3)
    },
    "prefetches nothing": Variant({"stage3_prefetch_bucket_size": 0}, stages=(3,)),
    "records its steps": Variant(top={"step_records": {"folder": FOLDER}}),
}


@pytest.mark.parametrize("row", cover(VARIANTS, by_family=True), ids=str)
def test_a_variant_changes_no_bit(row: Row, tmp_path: Path) -> None:
    check(row, VARIANTS[row.variant], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("row", cover(VARIANTS, strength=3), ids=str)
def test_any_three_settings_change_no_bit(row: Row, tmp_path: Path) -> None:
    check(row, VARIANTS[row.variant], tmp_path)
