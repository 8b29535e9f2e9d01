"""Simulated ranks train to the same bits as processes do, and a rank that fails ends them all."""

from __future__ import annotations

import pytest
import torch

from zero_core import CollectiveError
from zero_core.testing import Case, SimulatedRanks, Trace, run_ddp, run_engine, simulate, spawn

STEPS = 6  # in the fifth the branches differ between the ranks
CASE = Case(stage=3, accumulation=2, clipping=0.5)
OF_DDP = [
    Case(accumulation=2),
    Case(accumulation=3, is_local=True),
    Case(dtype="bf16", accumulation=2),
    Case(dtype="fp16"),
]


def _train(ranks: SimulatedRanks, case: Case) -> Trace:
    return run_engine(case, ranks.rank, STEPS, process_group=ranks)


def _train_in_process(rank: int, world_size: int, folder: str) -> None:
    trace = run_engine(CASE, rank, STEPS)
    torch.save([trace.losses, trace.values], f"{folder}/{rank}.pt")


def test_simulated_ranks_compute_the_bits_of_processes(tmp_path) -> None:  # type: ignore[no-untyped-def]
    spawn(_train_in_process, 3, str(tmp_path))
    for rank, trace in enumerate(simulate(_train, 3, CASE)):
        losses, values = torch.load(tmp_path / f"{rank}.pt")
        assert trace.losses == losses
        for name, value in values.items():
            assert torch.equal(trace.values[name], value), name


def _follow_ddp(ranks: SimulatedRanks, case: Case) -> Trace:
    return run_ddp(case, ranks.rank, STEPS, ranks)


def _ddp_in_process(rank: int, world_size: int, folder: str) -> None:
    traces = [run_ddp(case, rank, STEPS) for case in OF_DDP]
    torch.save([(trace.losses, trace.values) for trace in traces], f"{folder}/{rank}.pt")


def test_two_simulated_ranks_of_ddp_compute_its_bits(tmp_path) -> None:  # type: ignore[no-untyped-def]
    spawn(_ddp_in_process, 2, str(tmp_path))
    expected = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for index, case in enumerate(OF_DDP):
        for rank, trace in enumerate(simulate(_follow_ddp, 2, case)):
            losses, values = expected[rank][index]
            assert trace.losses == losses
            assert values.keys() == trace.values.keys()
            assert all(torch.equal(trace.values[name], value) for name, value in values.items())


def _fail_on_rank_1(ranks: SimulatedRanks) -> None:
    if ranks.rank == 1:
        raise KeyError("rank 1 has no data")
    ranks.connect().gather_bytes(b"")


def test_the_error_of_the_rank_that_fails_is_raised() -> None:
    with pytest.raises(KeyError, match="rank 1 has no data"):
        simulate(_fail_on_rank_1, 3)


def _branch(ranks: SimulatedRanks) -> str:
    carrier = ranks.messages()
    if ranks.rank == 0:
        carrier.isend(torch.zeros(2), 1, 7)
        return ""
    with pytest.raises(CollectiveError, match="expected a message of 4 bytes, got 8") as caught:
        carrier.irecv(torch.zeros(1), 0, 7).wait()
    return str(caught.value)


def test_a_message_of_another_size_is_refused() -> None:
    assert simulate(_branch, 2)[1]
