"""Measurement of a machine: bounded memory, and errors that name the failed rank."""

from __future__ import annotations

import subprocess
import sys

import pytest

from zero_engine.calibration.machine import default_ranks, first_failed
from zero_engine.calibration.training import EXCHANGED, exchanged


def test_many_cores_take_bounded_memory() -> None:
    """The default is at most 8 ranks, which together hold at most 512 MiB of a gather."""
    assert default_ranks(cores=128, devices=0) == {1, 2, 8}
    assert default_ranks(cores=1, devices=0) == {1}
    assert default_ranks(cores=128, devices=4) == {1, 4}
    assert exchanged(8, is_host=True) == list(EXCHANGED)
    for ranks in (16, 64, 512):
        assert max(exchanged(ranks, is_host=True)) * ranks**2 <= 2**29


def test_the_rank_that_failed_first_is_the_error() -> None:
    """Rank 0 would wait for the failed rank until a collective times out."""
    programs = ("import time; time.sleep(600)", "raise SystemExit(3)")
    started = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    try:
        assert first_failed(started, 300.0) == 1
        with pytest.raises(TimeoutError):
            first_failed(started[:1], 0.1)
    finally:
        for process in started:
            process.kill()
            process.wait()
