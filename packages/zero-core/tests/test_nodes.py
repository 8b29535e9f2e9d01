"""Training on two nodes of two ranks: DDP's values, and the bits of one node."""

from __future__ import annotations

import os

import torch

from zero_core.testing import Case, compare_with_ddp, read_gaps, run_engine, spawn

STEPS = 4
CASES = [Case(stage=stage) for stage in range(4)]
CASES += [Case(stage=stage, dtype="bf16", accumulation=2, clipping=0.5) for stage in (0, 2, 3)]
# As in test_equivalence.py: DDP adds four ranks in another order, and in bf16 it adds in bf16.
LOSS = {"fp32": 4e-6, "bf16": 0.07}
VALUE = {"fp32": 1e-6, "bf16": 0.04}


def _compare(rank: int, world_size: int, folder: str) -> None:
    compare_with_ddp(rank, world_size, CASES, folder, STEPS)
    for case in (Case(stage=3), Case(stage=0, dtype="bf16")):
        on_nodes = run_engine(case, rank, STEPS)
        os.environ["LOCAL_WORLD_SIZE"] = "4"
        on_one = run_engine(case, rank, STEPS)
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        assert on_nodes.losses == on_one.losses
        assert all(torch.equal(value, on_one.values[n]) for n, value in on_nodes.values.items())


def test_stages_on_two_nodes_follow_ddp_and_give_the_bits_of_one_node(tmp_path) -> None:
    spawn(_compare, 4, str(tmp_path), ranks_per_node=2)
    gaps = read_gaps(tmp_path, 4)
    assert len(gaps) == len(CASES)
    for index, case in enumerate(CASES):
        assert gaps[index].across_stages == 0.0, "a stage must not change a bit"
        assert gaps[index].loss <= LOSS[case.dtype], case
        assert gaps[index].value <= VALUE[case.dtype], case
