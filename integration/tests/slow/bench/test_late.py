"""Every case of the experiment `late` has the CPU's bits once, with delays; a fault is reported."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

import pytest
import torch

from benchmarks.experiments.late import CASES, Run, run_rows
from zero_core.comm.topology import find_ranks
from zero_core.testing import late_device, run_alone

DELAY_S = 5e-5
NAMES = sorted(CASES)


def runs_of(names: Sequence[str]) -> list[Run]:
    """Return a run per case, with two ranks where the case leaves that open."""
    sizes = [CASES[name].world_sizes for name in names]
    return [
        Run(number, name, 2 if 2 in some else some[0], DELAY_S)
        for number, (name, some) in enumerate(zip(names, sizes, strict=True))
    ]


@pytest.mark.parametrize("part", range(2))
def test_every_case_has_the_bits_of_the_cpu(part: int) -> None:
    rows = list(run_rows(runs_of(NAMES[part::2])))
    assert len(rows) == len(NAMES[part::2])
    assert [row for row in rows if row["failure"]] == []


def test_a_process_that_dies_fails_one_run() -> None:
    died, done = run_rows([Run(7, "no such case", 1, 0.0), Run(8, "loop, host", 1, 0.0)])
    assert died["number"] == 7
    assert "KeyError: 'no such case'" in died["failure"]
    assert done["number"] == 8
    assert done["failure"] == ""


def _use_one_device() -> None:
    late_device.load()
    torch.accelerator.set_device_index(2)
    late_device.forget_contexts()
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            if 1 in CASES[name].world_sizes:
                CASES[name].run(find_ranks(None, None), folder)
                assert late_device.contexts() == [2], name


def test_no_thread_touches_another_device() -> None:
    run_alone(_use_one_device)
