"""Threads of the host's kernels under torchrun, which gives torch one."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
import torch

from zero_offload import threads


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    _set_cores(monkeypatch, own=8, torchruns=8)
    for name in ("TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    threads.share_under_torchrun.cache_clear()
    yield
    torch.set_num_threads(before)
    threads.share_under_torchrun.cache_clear()


def _set_cores(monkeypatch: pytest.MonkeyPatch, *, own: int, torchruns: int) -> None:
    cores = {0: set(range(own)), os.getppid(): set(range(torchruns))}
    monkeypatch.setattr(os, "sched_getaffinity", cores.__getitem__, raising=False)


def _start(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(num_ranks))


def test_torchruns_one_thread_becomes_the_share_of_the_cores_and_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _start(monkeypatch, 2)
    with caplog.at_level(logging.WARNING):
        assert [threads.num_kernel_threads() for _ in range(3)] == [4, 4, 4]
    (record,) = caplog.records
    assert "takes 4 threads, as torchrun has 8 cores for 2 ranks" in record.getMessage()
    torch.set_num_threads(3)
    assert threads.num_kernel_threads() == 3


@pytest.mark.parametrize(
    ("own", "torchruns", "share"),
    [
        pytest.param(16, 128, 16, id="cores_of_its_own"),
        pytest.param(64, 128, 16, id="a_numa_node_that_four_ranks_share"),
        pytest.param(16, 16, 2, id="a_container_of_all_ranks"),
    ],
)
def test_a_rank_that_is_bound_to_cores_takes_its_share_of_them(
    monkeypatch: pytest.MonkeyPatch, own: int, torchruns: int, share: int
) -> None:
    _start(monkeypatch, 8)
    _set_cores(monkeypatch, own=own, torchruns=torchruns)
    assert threads.num_kernel_threads() == share


@pytest.mark.parametrize("num_ranks", [1, 8, 16])
def test_one_thread_stays_one_where_no_core_is_free(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_ranks: int
) -> None:
    _start(monkeypatch, num_ranks)
    assert threads.num_kernel_threads() == 1
    assert not caplog.records


def test_one_thread_that_a_program_chose_stays_one() -> None:
    assert threads.num_kernel_threads() == 1
