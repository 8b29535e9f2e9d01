"""Runs with quantized messages resume with the same bits; published weights stay near the exact.

Four simulated ranks are two nodes of two, and fall behind at random. That hpZ changes no bit is a
row of test_equalities.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.delayed import build
from zero_core.testing import SimulatedRanks, simulate
from zero_core.testing.scenarios import evaluate, micro_step

RANKS, PER_NODE = 4, 2

HPZ = {"zero_hpz_partition_size": PER_NODE}
QWZ = {"zero_quantized_weights": True}
QGZ = {"zero_quantized_gradients": True}
FOUR_BITS = {
    **QWZ,
    **HPZ,
    **QGZ,
    "zero_quantized_weights_format": "int4_difference",
    "zero_quantized_gradients_within_node": "int8",
    "zero_quantized_gradients_hadamard": True,
}


KEPT = {
    "hpZ": HPZ,
    "qwZ": QWZ,
    "qwZ, hpZ": {**QWZ, **HPZ},
    "qgZ": QGZ,
    "qgZ, error feedback": {**QGZ, "zeropp_loco_param": {}},
    "stochastic": {**QGZ, "zero_quantized_stochastic_rounding": True},
    "4-bit": FOUR_BITS,
}


def _goes_on(ranks: SimulatedRanks, zero: Mapping[str, Any], folder: Path) -> None:
    straight = build(ranks, "bf16", zero)
    for step in range(3):
        micro_step(straight, step)
    straight.save_checkpoint(folder)
    expected = [micro_step(straight, step) for step in range(3, 6)]
    resumed = build(ranks, "bf16", zero)
    resumed.load_checkpoint(folder)
    found = [micro_step(resumed, step) for step in range(3, 6)]
    values, wanted = resumed.full_state_dict(), straight.full_state_dict()
    for engine in (straight, resumed):
        engine.close()
    assert found == expected
    torch.testing.assert_close(values, wanted, rtol=0.0, atol=0.0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", KEPT)
def test_run_that_saved_and_goes_on_equals_the_one_that_resumes(name: str, tmp_path: Path) -> None:
    simulate(_goes_on, RANKS, KEPT[name], tmp_path, ranks_per_node=PER_NODE)


def _keeps_errors(ranks: SimulatedRanks) -> None:
    engine = build(ranks, "fp32", FOUR_BITS)
    exact = engine.full_state_dict(dtype=torch.float32)
    bound = 0.0
    for step in range(12):
        micro_step(engine, step)
        before, exact = exact, engine.full_state_dict(dtype=torch.float32)
        update = max(float((exact[n] - before[n]).abs().max()) for n in exact)
        # What is sent has the update and the last error in it; half a step of 7 levels is lost of
        # that, 1/128 more as the scale is rounded up to bf16.
        bound = (update + bound) / 14 * (1 + 1 / 128)
    found: dict[str, Tensor] = {}
    for name, block in engine.module.blocks.named_children():
        prefix = f"blocks.{name}"

        def note(module: nn.Module, _: object, prefix: str = prefix) -> None:
            found.update({f"{prefix}.{n}": p.clone() for n, p in module.named_parameters()})

        block.register_forward_pre_hook(note)  # after the engine's, which gathers
    evaluate(engine, 12)
    furthest = max(float((found[n] - exact[n]).abs().max()) for n in found)
    assert 0.0 < furthest <= bound


def test_published_weights_are_one_rounding_from_the_exact_ones() -> None:
    """Errors do not add up: what a difference could not say is in the next one."""
    simulate(_keeps_errors, RANKS, ranks_per_node=PER_NODE)
