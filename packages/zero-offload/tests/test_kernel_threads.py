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
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for name in ("TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    threads._share_under_torchrun.cache_clear()
    yield
    torch.set_num_threads(before)
    threads._share_under_torchrun.cache_clear()


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
    assert "takes 4 threads, 8 cores over 2 ranks of the node" in record.getMessage()
    torch.set_num_threads(3)
    assert threads.num_kernel_threads() == 3


@pytest.mark.parametrize("num_ranks", [1, 8, 16])
def test_one_thread_stays_one_where_no_core_is_free(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_ranks: int
) -> None:
    _start(monkeypatch, num_ranks)
    assert threads.num_kernel_threads() == 1
    assert not caplog.records


def test_one_thread_that_a_program_chose_stays_one() -> None:
    assert threads.num_kernel_threads() == 1
