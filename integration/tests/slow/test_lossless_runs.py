"""500 steps with lossless messages have the bits of the plain stage: losses, norms, and weights.

Accumulated micro-steps, steps that overflow and are skipped, an edit of weights, and a checkpoint
that is saved and loaded lie within them. Ranks are simulated, as one or two nodes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zero_core
from zero_core.testing import Case, SimulatedRanks, batch, make_model, simulate

STEPS, EDITED, SAVED, LOADED = 500, 120, 200, 260
WIDTH = 98
WEIGHTS = {"zero_lossless_weights": True}
BOTH = {**WEIGHTS, "zero_lossless_gradients": True}


def _train(
    ranks: SimulatedRanks, stage: int, dtype: str, zero: dict[str, Any], folder: Path
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    case = Case(stage=stage, dtype=dtype, accumulation=2, clipping=1.0, zero=zero, width=WIDTH)
    engine = zero_core.build(make_model(WIDTH), case.config(), process_group=ranks)
    found: list[Any] = []
    for step in range(STEPS):
        for micro in range(2):
            loss = engine(**batch(step, micro, engine.rank))["loss"]
            engine.backward(loss * torch.nan if (step, micro) == (300, 1) else loss)
            engine.step()
            found.append(loss.item())
        found.append(engine.get_global_grad_norm())
        if step == EDITED:
            with engine.gathered(modifier_rank=0) as model, torch.no_grad():
                if engine.rank == 0:
                    model.blocks[0].up.weight.mul_(1.25)
        if step == SAVED:
            engine.save_checkpoint(folder)
        if step == LOADED:
            engine.load_checkpoint(folder)
    found.append(engine.skipped_steps)
    values = engine.full_state_dict(dtype=torch.float32)
    engine.close()
    return found, values


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("ranks", "per_node", "dtype"),
    [(1, 1, "bf16"), (2, 1, "bf16"), (3, 1, "fp16"), (4, 2, "fp32"), (4, 2, "bf16")],
)
def test_500_steps_have_the_bits_of_the_plain_stage(
    ranks: int, per_node: int, dtype: str, stage: int, tmp_path: Path
) -> None:
    plain, *lossless = (
        simulate(
            *(_train, ranks, stage, dtype, zero, tmp_path / name),
            ranks_per_node=per_node,
        )
        for name, zero in (("plain", {}), ("weights", WEIGHTS), ("both", BOTH))
    )
    for ours in lossless:
        for (facts, values), (exact_facts, exact_values) in zip(ours, plain, strict=True):
            torch.testing.assert_close(facts, exact_facts, rtol=0.0, atol=0.0, equal_nan=True)
            torch.testing.assert_close(values, exact_values, rtol=0.0, atol=0.0)
            assert facts[-1] > 0
