"""With the optimizer offloaded, four steps follow DDP with torch.optim.AdamW at every stage.

The rest of the grid (without offload) is in zero-core's own tests; model, oracle and comparison are
in zero_core.testing.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from zero_core.testing import Case, Gap, compare_with_ddp, read_gaps, spawn

STEPS = 4


def _offload(ratio: float) -> dict[str, object]:
    return {"offload_optimizer": {"device": "cpu", "ratio": ratio}}


CASES = [  # more ratios: test_equalities.py
    Case(stage, dtype, accumulation, clipping, zero=_offload((1.0, 0.4)[stage % 2]))
    for dtype, (accumulation, clipping), stage in itertools.product(
        ("fp32", "bf16"), ((1, 0.5), (3, 0.0)), (0, 1, 2, 3)
    )
]

# The host kernel rounds in another order than torch's loop: an ulp per step in fp32. In bf16, DDP
# adds the ranks' gradients in bf16 and the engine in fp32.
LOSS = {"fp32": 4e-6, "bf16": 0.07}
VALUE = {"fp32": 2e-6, "bf16": 0.04}


def _name(case: Case) -> str:
    ratio = case.zero["offload_optimizer"]["ratio"]
    clip = "clip" if case.clipping else "noclip"
    return f"stage{case.stage}-ratio{ratio}-{case.dtype}-accumulation{case.accumulation}-{clip}"


@pytest.fixture(scope="module", params=[3], ids=lambda n: f"{n}ranks")
def grid(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Gap]:
    world_size: int = request.param
    folder: Path = tmp_path_factory.mktemp("gaps")
    spawn(compare_with_ddp, world_size, CASES, str(folder), STEPS)
    return read_gaps(folder, world_size)


@pytest.mark.parametrize("index", range(len(CASES)), ids=[_name(c) for c in CASES])
def test_offloaded_steps_follow_ddp(grid: dict[int, Gap], index: int) -> None:
    case, gap = CASES[index], grid[index]
    assert gap.across_stages == 0.0, "neither stage nor ratio may change a bit"
    assert gap.loss <= LOSS[case.dtype]
    assert gap.value <= VALUE[case.dtype]
