"""Quantized weights and gradients in the engine: at every stage, composed with everything else.

On simulated ranks, and once on processes. Where a run has to be near an unquantized one, that is
the engine's: `test_equivalence` holds it against DDP.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from zero_core.testing import Case, SimulatedRanks, Trace, run_engine, simulate, spawn

STEPS = 4
WIDTH = 33  # shards of a few blocks and a bit

QWZ = {"zero_quantized_weights": True}
QGZ = {"zero_quantized_gradients": True}


def hpz(size: int) -> dict[str, Any]:
    return {"zero_hpz_partition_size": size}


def four_bit(size: int) -> dict[str, Any]:
    return {
        **QWZ,
        **QGZ,
        **hpz(size),
        "zero_quantized_weights_format": "int4_difference",
        "zero_quantized_gradients_within_node": "int8",
        "zero_quantized_gradients_hadamard": True,
    }


def _run(case: Case, ranks: SimulatedRanks) -> Trace:
    return run_engine(case, ranks.rank, STEPS, process_group=ranks)


def _assert_equal(found: Trace, expected: Trace, what: object) -> None:
    assert found.losses == expected.losses, what
    for name, value in expected.values.items():
        assert torch.equal(found.values[name], value), (what, name)


def _relative_gap(found: Trace, exact: Trace) -> float:
    losses = zip(found.losses, exact.losses, strict=True)
    return max(abs(a - b) / b for a, b in losses)


def _compare_stages(ranks: SimulatedRanks) -> None:
    accumulated = {"accumulation": 3, "is_local": True, "clipping": 0.5}
    for dtype, stages, more in (("fp32", (3, 0), {}), ("bf16", (3, 2, 1, 0), accumulated)):
        expected: Trace | None = None
        for stage in stages:
            case = Case(stage, dtype, zero=QGZ, width=WIDTH, **more)
            found = _run(case, ranks)
            if expected is None:
                expected = found
                exact = _run(replace(case, zero={}), ranks)
                gap = _relative_gap(found, exact)
                # Four bits show, and only so much: 0.02 in the first four steps.
                assert 1e-6 < gap < 0.06, (dtype, more, gap)
            _assert_equal(found, expected, (stage, dtype, more))


@pytest.mark.parametrize(
    ("world_size", "per_node"), [pytest.param(3, 1, marks=pytest.mark.slow), (4, 2)]
)
def test_quantized_gradients_give_the_same_bits_at_every_stage(
    world_size: int, per_node: int
) -> None:
    simulate(_compare_stages, world_size, ranks_per_node=per_node)


def _compare_offload(ranks: SimulatedRanks) -> None:
    for mode in ({**QWZ, **QGZ, **hpz(2)}, four_bit(2)):
        expected: Trace | None = None
        for ratio, is_early in ((1.0, False), (0.3, False), (0.3, True)):
            offload = {"device": "cpu", "ratio": ratio, "update_in_backward": is_early}
            case = Case(
                3,
                "bf16",
                zero={**mode, "offload_optimizer": offload},
                top={"check_grad_overflow": False},
                width=WIDTH,
            )
            found = _run(case, ranks)
            expected = expected or found
            _assert_equal(found, expected, (mode, ratio, is_early))


def test_offload_changes_no_bit_of_what_is_quantized() -> None:
    """Neither the ratio nor when units are updated: the exchanges see the same values."""
    simulate(_compare_offload, 4, ranks_per_node=2)


def _compare_rested(rank: int, world_size: int) -> None:
    mode = {**QWZ, **QGZ, **hpz(2)}
    plain, rested = (
        run_engine(Case(3, "bf16", zero={**mode, **more}, width=WIDTH), rank, STEPS)
        for more in ({}, {"offload_param": {"device": "nvme", "nvme_path": "/tmp"}})
    )
    _assert_equal(rested, plain, mode)


def test_weights_that_rest_on_a_disk_are_quantized_alike() -> None:
    spawn(_compare_rested, 4, ranks_per_node=2)


def _run_odd(ranks: SimulatedRanks) -> None:
    size = ranks.size
    modes = ({**QWZ, **QGZ}, {**QWZ, **QGZ, **hpz(size)}, four_bit(size))
    for dtype in ("fp32", "fp16"):
        expected = _run(Case(3, dtype, width=WIDTH, clipping=1.0), ranks)
        for mode in modes:
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
