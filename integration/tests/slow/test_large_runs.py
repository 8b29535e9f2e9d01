"""A run of a model by its size, resumed midway, goes on with the bits of one that never stopped."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import run_program
from test_stop_and_resume import numbers

from zero_engine.train.settings import RunFolder


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("states", ["memory", "files"])
def test_resumed_run_has_the_bits_of_one_that_never_stopped(
    states: str, ranks: int, tmp_path: Path
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    shape = ("--size=1m", f"--states={states}", f"--ranks={ranks}", "--context=64")
    saving = ("--steps=8", "--save-every=4", "--keep-last=2", "--sample-tokens=0")
    run_program("train", *shape, *saving, f"--output={whole}")
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoint" / "step-8")
    (resumed / "checkpoint" / "latest").write_text("step-4", encoding="utf-8")
    run_program("train", "--resume", f"--output={resumed}")
    expected, found = numbers(RunFolder(whole)), numbers(RunFolder(resumed))
    assert expected[-1]["step"] == 8
    assert found == expected
