"""Nodes of ranks, from the environment variables that launchers set."""

import logging
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_comm import TorchCollectives
from zero_comm.transport.topology import check_ranks_per_node, node_key, ranks_per_node_of

SLURM = {"SLURM_NODEID": "3", "SLURM_PROCID": "12"}


def test_torchrun_tells_the_node_also_under_slurm() -> None:
    env = {**SLURM, "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
    assert node_key(env, 5) == node_key(env, 4)
    assert node_key(env, 5) != node_key({**env, "GROUP_RANK": "0"}, 3)


def test_the_local_world_size_alone_cuts_ranks_into_runs() -> None:
    keys = [node_key({"LOCAL_WORLD_SIZE": "2"}, rank) for rank in range(6)]
    assert ranks_per_node_of(keys) == 2
    assert len(set(keys)) == 3


def test_slurm_tells_the_node() -> None:
    assert node_key(SLURM, 12) == node_key(SLURM, 13)
    assert node_key(SLURM, 12) != node_key({**SLURM, "SLURM_NODEID": "4"}, 16)


def test_without_a_launcher_that_numbers_nodes_the_host_is_the_node() -> None:
    open_mpi = {"OMPI_COMM_WORLD_RANK": "7", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    assert node_key({}, 0) == node_key(open_mpi, 7) == f"host {socket.gethostname()}"


@pytest.mark.parametrize(
    ("nodes", "expected", "told"),
    [("aaaabb", 2, "nodes have [4, 2] ranks; groups of 2"), ("abab", 1, "not consecutive")],
)
def test_uneven_or_interleaved_nodes_are_told(
    nodes: str, expected: int, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert ranks_per_node_of(nodes) == expected
    assert told in caplog.text


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_groups_are_the_largest_that_lie_within_nodes(sizes: list[int]) -> None:
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    found = ranks_per_node_of(nodes)
    for candidate in range(1, max(sizes) + 1):
        runs = [nodes[i : i + candidate] for i in range(0, len(nodes), candidate)]
        fits = all(len(run) == candidate and len(set(run)) == 1 for run in runs)
        assert fits <= (candidate <= found)
        assert fits or candidate != found


@pytest.mark.parametrize("number", [0, -1, 2])
def test_a_number_that_does_not_divide_the_group_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match=f"divisor of the group's 1 ranks, got {number}"):
        check_ranks_per_node(TorchCollectives(), number)
