"""Simulated ranks train to the same bits as processes do, and a rank that fails ends them all."""

from __future__ import annotations

import gc

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


def test_three_simulated_ranks_of_ddp_follow_it(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """DDP adds three gradients in another order: a few ulps, grown over the steps."""
    spawn(_ddp_in_process, 3, str(tmp_path))
    for rank, trace in enumerate(simulate(_follow_ddp, 3, OF_DDP[0])):
        losses, values = torch.load(tmp_path / f"{rank}.pt")[0]
        assert trace.losses == pytest.approx(losses, abs=4e-6, rel=0)
        for name, value in values.items():
            torch.testing.assert_close(trace.values[name], value, atol=1e-6, rtol=0)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_stage_has_the_same_bits(world_size: int) -> None:
    first, *others = (simulate(_train, world_size, Case(stage=stage)) for stage in range(4))
    for traces in others:
        for ours, theirs in zip(first, traces, strict=True):
            assert ours.losses == theirs.losses
            assert all(torch.equal(ours.values[n], v) for n, v in theirs.values.items())


def test_nodes_of_two_ranks_send_once_per_node() -> None:
    near, far = (
        simulate(_train, 4, Case(stage=3), ranks_per_node=per_node) for per_node in (None, 2)
    )
    assert all(trace.between_nodes_bytes == 0 for trace in near)
    assert all(trace.between_nodes_bytes > 0 for trace in far)
    assert near[0].losses == far[0].losses


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


def _read_generator(ranks: SimulatedRanks) -> bool:
    for _ in range(5000):
        garbage = torch.nn.Parameter(torch.empty(1))
        garbage.itself = garbage  # type: ignore[attr-defined]
        torch.get_rng_state()
    return gc.isenabled()


def test_ranks_read_the_generator_beside_each_other_and_leave_garbage() -> None:
    """A collection under the generator's lock would have them wait for each other for ever."""
    assert simulate(_read_generator, 3) == [False] * 3
    assert gc.isenabled()
