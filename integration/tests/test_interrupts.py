"""Ctrl-C anywhere in a step with states on the host: training goes on, or the engine says how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zero_core.testing import Case, check_left_anywhere

UNDECIDED: dict[str, Any] = {"check_grad_overflow": False}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("num_moments", [20, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case",
    [
        Case(stage=1, zero={"offload_optimizer": {"device": "cpu"}}),
        Case(stage=2, dtype="bf16", zero={"offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
        Case(stage=3, zero={"offload_optimizer": {"device": "cpu"}}, top=UNDECIDED),
        Case(
            stage=2,
            dtype="bf16",
            clipping=1e6,
            zero={"offload_optimizer": {"device": "cpu", "update_in_backward": True}},
        ),
        Case(stage=3, zero={s: {"device": "cpu"} for s in ("offload_optimizer", "offload_param")}),
    ],
    ids=["host", "half on the host", "in backward", "undone", "parameters too"],
)
def test_offloaded_training_left_at_any_moment_goes_on_or_the_engine_says_how(
    case: Case, num_moments: int, tmp_path: Path
) -> None:
    packages = ("zero_core", "zero_offload", "cpu_adam")
    check_left_anywhere(case.config(), tmp_path, num_moments, packages)
