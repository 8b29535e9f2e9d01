"""The schedules' curves, bit by bit those of DeepSpeed's own classes, where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("deepspeed_curves.py")


def run(module: str) -> Any:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), module],
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed to compare with"
)
def test_rates_momenta_and_arguments_are_those_of_deepspeed_at_every_step() -> None:
    theirs = run("deepspeed.runtime.lr_schedules")
    ours = run("zero_engine.deepspeed.lr_schedules")
    assert ours["tuning"] == theirs["tuning"]
    for mine, expected in zip(ours["curves"], theirs["curves"], strict=True):
        assert mine == expected  # JSON keeps every bit of a float
    rates = {row[1][0] for curve in theirs["curves"] for row in curve[1:]}
    assert len(rates) > 150  # the curves do move
