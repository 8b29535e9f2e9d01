"""With the optimizer offloaded, four steps follow DDP with torch.optim.AdamW at every stage.

The rest of the grid (without offload) is in zero-core's own tests; model and oracle are in
zero_core.testing.
"""

from __future__ import annotations

import pytest
import torch

from zero_core.testing import Case, SimulatedRanks, Trace, run_ddp, run_engine, simulate

STEPS = 4
# The host kernel rounds in another order than torch's loop: an ulp per step in fp32. In bf16, DDP
# adds the ranks' gradients in bf16 and the engine in fp32.
LOSS = {"fp32": 4e-6, "bf16": 0.07}
VALUE = {"fp32": 2e-6, "bf16": 0.04}
RATIOS = (1.0, 0.4, 1.0, 0.4)  # by stage; more in test_equalities.py


def _train(
    ranks: SimulatedRanks, dtype: str, accumulation: int, clipping: float
) -> tuple[list[Trace], Trace]:
    cases = [
        Case(stage, dtype, accumulation, clipping, zero={"offload_optimizer": host})
        for stage, ratio in enumerate(RATIOS)
        for host in [{"device": "cpu", "ratio": ratio}]
    ]
    found = [run_engine(case, ranks.rank, STEPS, process_group=ranks) for case in cases]
    return found, run_ddp(cases[0], ranks.rank, STEPS, ranks)


@pytest.mark.parametrize(("accumulation", "clipping"), [(1, 0.5), (3, 0.0)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_offloaded_steps_follow_ddp(dtype: str, accumulation: int, clipping: float) -> None:
    for (first, *others), expected in simulate(_train, 3, dtype, accumulation, clipping):
        for other in others:  # neither stage nor ratio may change a bit
            assert other.losses == first.losses
            torch.testing.assert_close(other.values, first.values, rtol=0.0, atol=0.0)
        torch.testing.assert_close(first.losses, expected.losses, rtol=0.0, atol=LOSS[dtype])
        torch.testing.assert_close(first.values, expected.values, rtol=0.0, atol=VALUE[dtype])
