"""Ten steps follow DDP with torch.optim.AdamW, bit by bit where the arithmetic allows it.

The model, the oracle and the comparison are in zero_core.testing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import pytest

from zero_core.testing import Case, Gap, compare_with_ddp, read_gaps, spawn

STEPS = 10
CASES = [
    Case(stage=stage, dtype=dtype, accumulation=accumulation, clipping=clipping, is_local=is_local)
    for dtype, (accumulation, is_local), clipping, stage in itertools.product(
        ("fp32", "bf16"), ((1, False), (3, False), (3, True)), (0.0, 0.5), (0, 1, 2, 3)
    )
]
# Some of their steps overflow and are skipped, those that torch's GradScaler skips. (Locally torch
# adds micro-steps up in fp16, and skips others.)
CASES += [
    Case(stage=stage, dtype="fp16", accumulation=accumulation, clipping=clipping)
    for (accumulation, clipping), stage in itertools.product(((1, 0.5), (3, 0.0)), (0, 1, 2, 3))
]
# Several ranks differ from one in sums and in (for three, uneven) shards, whatever the rest of the
# step: with two, whose sums are exact, what does not clip is run; with three, what clips, and one
# case that does not.
IN_FP16 = [c for c in CASES if c.dtype == "fp16"]
OTHERS = [c for c in CASES if c.dtype != "fp16"]
CASES_OF = {
    1: CASES,
    2: [c for c in OTHERS if not c.clipping] + IN_FP16,
    3: [c for c in OTHERS if c.clipping or (c.accumulation == 3 and not c.is_local)] + IN_FP16,
}

# fp32: clipping and three ranks add in another order than DDP; a few ulps, grown over ten steps.
# bf16: DDP adds the ranks' gradients in bf16, the engine in fp32: half an ulp of 8 bits, of
# gradients that Adam normalises to steps of 1e-2. fp16: the same with 11 bits.
# Each bound is twice the largest gap measured.
LOSS = {"fp32": 4e-6, "bf16": 0.07, "fp16": 0.0045}
VALUE = {"fp32": 1e-6, "bf16": 0.04, "fp16": 4.5e-4}


@pytest.fixture(scope="module")
def gaps_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[int, Gap]]:
    """The gaps of so many ranks, which run once."""

    @cache
    def run(world_size: int) -> dict[int, Gap]:
        folder = tmp_path_factory.mktemp("gaps")
        spawn(compare_with_ddp, world_size, CASES_OF[world_size], str(folder), STEPS)
        return read_gaps(folder, world_size)

    return run


def _name(case: Case) -> str:
    how = "local" if case.is_local else "reduced"
    clip = "clip" if case.clipping else "noclip"
    return f"stage{case.stage}-{case.dtype}-{case.accumulation}{how}-{clip}"


@pytest.mark.parametrize(
    ("world_size", "index"),
    [
        pytest.param(world_size, index, id=f"{world_size}ranks-{_name(case)}")
        for world_size, cases in CASES_OF.items()
        for index, case in enumerate(cases)
    ],
)
def test_ten_steps_follow_ddp(
    gaps_of: Callable[[int], dict[int, Gap]], world_size: int, index: int
) -> None:
    case, gap = CASES_OF[world_size][index], gaps_of(world_size)[index]
    assert gap.across_stages == 0.0, "a stage must not change a bit"
    is_exact = case.dtype == "fp32" and world_size <= 2 and not case.clipping
    is_exact |= case.dtype == "fp16" and world_size == 1 and not case.clipping
    assert gap.loss <= (0.0 if is_exact else LOSS[case.dtype])
    assert gap.value <= (0.0 if is_exact else VALUE[case.dtype])
