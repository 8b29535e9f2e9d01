"""Quantized weights and gradients in the engine: at every stage, and after a restart.

That neither offload nor hpZ changes a bit of them is shown by rows of test_equalities.py. Where a
run has to be near an unquantized one, that is the engine's: `test_equivalence` holds it against
DDP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.delayed import build
from zero_core.testing import Case, SimulatedRanks, Trace, batch, run_engine, simulate, train
from zero_core.testing.scenarios import evaluate

WIDTH = 33  # shards of a few blocks and a bit
QWZ = {"zero_quantized_weights": True}
QGZ = {"zero_quantized_gradients": True}


def hpz(size: int) -> dict[str, Any]:
    return {"zero_hpz_partition_size": size}


def four_bits(size: int) -> dict[str, Any]:
    return {
        **QWZ,
        **QGZ,
        **hpz(size),
        "zero_quantized_weights_format": "int4_difference",
        "zero_quantized_gradients_within_node": "int8",
        "zero_quantized_gradients_hadamard": True,
    }


def _run(case: Case, ranks: SimulatedRanks) -> Trace:
    return run_engine(case, ranks.rank, 4, process_group=ranks)


def _relative_gap(found: Trace, exact: Trace) -> float:
    losses = zip(found.losses, exact.losses, strict=True)
    return max(abs(a - b) / b for a, b in losses)


def _compare_stages(ranks: SimulatedRanks) -> None:
    accumulated = {"accumulation": 3, "is_local": True, "clipping": 0.5}
    for dtype, stages, more in (("fp32", (0,), {}), ("bf16", (2, 1, 0), accumulated)):
        case = Case(3, dtype, zero=QGZ, width=WIDTH, **more)
        expected = _run(case, ranks)
        # Four bits show, and only so much: 0.02 in the first four steps.
        assert 1e-6 < _relative_gap(expected, _run(replace(case, zero={}), ranks)) < 0.06
        for stage in stages:
            found = _run(replace(case, stage=stage), ranks)
            assert found.losses == expected.losses, (stage, dtype)
            torch.testing.assert_close(found.values, expected.values, rtol=0.0, atol=0.0)


@pytest.mark.parametrize(
    ("world_size", "per_node"), [pytest.param(3, 1, marks=pytest.mark.slow), (4, 2)]
)
def test_quantized_gradients_give_the_same_bits_at_every_stage(world_size, per_node):
    simulate(_compare_stages, world_size, ranks_per_node=per_node)


def _run_odd(ranks: SimulatedRanks) -> None:
    size = ranks.size
    for dtype in ("fp32", "fp16"):
        expected = _run(Case(3, dtype, width=WIDTH, clipping=1.0), ranks)
        for mode in ({**QWZ, **QGZ}, {**QWZ, **QGZ, **hpz(size)}, four_bits(size)):
            found = _run(Case(3, dtype, zero=mode, width=WIDTH, clipping=1.0), ranks)
            assert found.num_skipped == expected.num_skipped
            assert _relative_gap(found, expected) < 0.06, (mode, dtype)


@pytest.mark.parametrize(
    ("world_size", "per_node"),
    [
        pytest.param(1, 1, marks=pytest.mark.slow),
        (3, 1),
        pytest.param(3, 3, marks=pytest.mark.slow),
    ],
)
def test_one_rank_one_node_and_odd_numbers_of_nodes_work(world_size: int, per_node: int) -> None:
    simulate(_run_odd, world_size, ranks_per_node=per_node)


KEPT = {
    "qwZ": QWZ,
    "qwZ, hpZ": {**QWZ, **hpz(2)},
    "qgZ": QGZ,
    "qgZ, error feedback": {**QGZ, "zeropp_loco_param": {}},
    "stochastic": {**QGZ, "zero_quantized_stochastic_rounding": True},
    "4-bit": four_bits(2),
}


def _goes_on(ranks: SimulatedRanks, zero: Mapping[str, Any], folder: Path) -> None:
    before, after = ([batch(n, 0, ranks.rank) for n in steps] for steps in (range(3), range(3, 6)))
    straight, resumed = (build(ranks, "bf16", zero) for _ in range(2))
    train(straight, before)
    straight.save_checkpoint(folder)
    resumed.load_checkpoint(folder)
    assert train(resumed, after) == train(straight, after)
    values, wanted = resumed.full_state_dict(), straight.full_state_dict()
    torch.testing.assert_close(values, wanted, rtol=0.0, atol=0.0)
    for engine in (straight, resumed):
        engine.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", KEPT)
def test_run_that_saved_and_goes_on_equals_the_one_that_resumes(name: str, tmp_path: Path) -> None:
    simulate(_goes_on, 4, KEPT[name], tmp_path, ranks_per_node=2)


def _keeps_errors(ranks: SimulatedRanks) -> None:
    engine = build(ranks, "fp32", four_bits(2))
    exact = engine.full_state_dict(dtype=torch.float32)
    bound = 0.0
    for step in range(12):
        train(engine, [batch(step, 0, ranks.rank)])
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
    simulate(_keeps_errors, 4, ranks_per_node=2)
