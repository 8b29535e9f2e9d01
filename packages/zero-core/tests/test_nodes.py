"""Training on two nodes of two ranks: DDP's values, and the bits of one node."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from zero_core.testing import Case, SimulatedRanks, Trace, run_ddp, run_engine, simulate, spawn

STEPS = 4
CASES = [Case(), Case(dtype="bf16", accumulation=2, clipping=0.5)]
# As in test_equivalence.py: in bf16 DDP adds in bf16.
LOSS = {"fp32": 0.0, "bf16": 0.07}
VALUE = {"fp32": 0.0, "bf16": 0.04}


def _train(ranks: SimulatedRanks, case: Case) -> Trace:
    return run_engine(case, ranks.rank, STEPS, process_group=ranks)


def _train_by_ddp(ranks: SimulatedRanks, case: Case) -> Trace:
    return run_ddp(case, ranks.rank, STEPS, ranks)


def _assert_equal(found: Trace, expected: Trace) -> None:
    assert found.losses == expected.losses
    assert all(torch.equal(value, expected.values[n]) for n, value in found.values.items())


@pytest.mark.parametrize(
    "case", [pytest.param(CASES[0], marks=pytest.mark.slow), CASES[1]], ids=["fp32", "bf16"]
)
def test_stages_on_two_nodes_follow_ddp_and_give_the_bits_of_one_node(case: Case) -> None:
    on_one = simulate(_train, 4, case)
    for stage in range(4):
        on_nodes = simulate(_train, 4, replace(case, stage=stage), ranks_per_node=2)
        for rank in range(4):
            assert on_nodes[rank].between_nodes_bytes > 0
            _assert_equal(on_nodes[rank], on_one[rank])
    for found, expected in zip(on_one, simulate(_train_by_ddp, 4, case), strict=True):
        close = torch.testing.assert_close
        close(found.losses, expected.losses, rtol=0.0, atol=LOSS[case.dtype])
        close(found.values, expected.values, rtol=0.0, atol=VALUE[case.dtype])


def _on_processes(rank: int, world_size: int) -> None:
    for case in (Case(stage=3), Case(stage=0, dtype="bf16")):
        on_nodes = run_engine(case, rank, STEPS)
        os.environ["LOCAL_WORLD_SIZE"] = "4"
        on_one = run_engine(case, rank, STEPS)
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        assert on_nodes.between_nodes_bytes > on_one.between_nodes_bytes == 0
        _assert_equal(on_nodes, on_one)


@pytest.mark.slow
def test_processes_that_a_launcher_puts_on_two_nodes_give_the_bits_of_one_node() -> None:
    spawn(_on_processes, 4, ranks_per_node=2)
