"""Simulated ranks train to the same bits as processes do."""

import pytest
import torch

from zero_core.testing import Case, SimulatedRanks, run_ddp, run_engine, run_on_processes, simulate
from zero_core.testing.training import assert_same

STEPS = 6  # in the fifth the branches differ between the ranks
CASE = Case(stage=3, accumulation=2, clipping=0.5)
OF_DDP = [
    Case(accumulation=2),
    Case(accumulation=3, is_local=True),
    Case(dtype="bf16", accumulation=2),
    Case(dtype="fp16"),
]


def _save(ranks, folder):
    is_simulated = isinstance(ranks, SimulatedRanks)
    traces = [run_engine(CASE, ranks.rank, STEPS, process_group=ranks)]
    if ranks.size == 2:
        traces += [
            run_ddp(case, ranks.rank, STEPS, ranks if is_simulated else None) for case in OF_DDP
        ]
    name = f"{'simulated' if is_simulated else 'process'} {ranks.rank}.pt"
    torch.save([(trace.losses, trace.values) for trace in traces], folder / name)


@pytest.mark.parametrize("world_size", [2, 3])
def test_simulated_ranks_compute_the_bits_of_processes_and_of_ddp(world_size, tmp_path):
    run_on_processes(_save, world_size, tmp_path)
    simulate(_save, world_size, tmp_path)
    for rank in range(world_size):
        found, expected = (
            torch.load(tmp_path / f"{kind} {rank}.pt") for kind in ("simulated", "process")
        )
        assert_same(found, expected)
