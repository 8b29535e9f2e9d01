"""Threads of host kernels under torchrun, which gives torch one thread."""

from __future__ import annotations

import logging
import os

import pytest
import torch

from zero_offload import threads


@pytest.mark.parametrize(
    ("own", "torchruns", "num_ranks", "is_torchruns", "share"),
    [
        pytest.param(8, 8, 2, True, 4, id="of_all_cores"),
        pytest.param(16, 128, 8, True, 16, id="cores_of_its_own"),
        pytest.param(64, 128, 8, True, 16, id="a_numa_node_that_four_ranks_share"),
        pytest.param(16, 16, 8, True, 2, id="a_container_of_all_ranks"),
        pytest.param(8, 8, 1, True, 1, id="one_rank_is_told_nothing"),
        pytest.param(8, 8, 8, True, 1, id="no_core_is_free"),
        pytest.param(8, 8, 16, True, 1, id="more_ranks_than_cores"),
        pytest.param(8, 8, 2, False, 1, id="a_program_chose_one"),
    ],
)
def test_torchruns_one_thread_becomes_the_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    own: int,
    torchruns: int,
    num_ranks: int,
    is_torchruns: bool,
    share: int,
) -> None:
    settings = {"TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}
    for name, value in {**settings, "LOCAL_WORLD_SIZE": str(num_ranks)}.items():
        if is_torchruns:
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)
    cores = {0: set(range(own)), os.getppid(): set(range(torchruns))}
    monkeypatch.setattr(os, "sched_getaffinity", cores.__getitem__, raising=False)
    threads.share_under_torchrun.cache_clear()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with caplog.at_level(logging.WARNING):
            assert [threads.num_kernel_threads() for _ in range(3)] == [share] * 3
        said = f"takes {share} threads, as torchrun has {torchruns} cores for {num_ranks} ranks"
        assert [said in record.getMessage() for record in caplog.records] == [True] * (share > 1)
        torch.set_num_threads(3)
        assert threads.num_kernel_threads() == 3
    finally:
        torch.set_num_threads(before)
        threads.share_under_torchrun.cache_clear()
