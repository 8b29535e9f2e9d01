"""The smaller commands."""

from __future__ import annotations

import importlib.metadata
import json
import shutil

import pytest
from conftest import run_here
from typer.testing import CliRunner

import zero_engine
from zero_engine.cli import app
from zero_engine.train.launch import rank_environment


def test_config_prints_the_default_configuration() -> None:
    config = json.loads(run_here("config"))
    assert config["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "ratio": 0.5},
        "zero_quantized_weights": True,
    }


def test_version_is_that_of_the_distribution() -> None:
    assert CliRunner().invoke(app, ["version"]).output.strip() == zero_engine.__version__
    assert importlib.metadata.version("zero-engine") == zero_engine.__version__


def test_command_is_installed() -> None:
    (point,) = importlib.metadata.entry_points(group="console_scripts", name="zero-engine")
    assert callable(point.load())
    assert shutil.which("zero-engine") is not None or point.dist is not None


@pytest.mark.parametrize("flags", [["--resume", "--overwrite"], ["--ranks", "0"]])
def test_contradictory_options_are_refused(flags: list[str]) -> None:
    assert CliRunner().invoke(app, ["train", *flags]).exit_code == 2


def test_threads_are_shared_among_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero_engine.train.launch.available_cores", lambda: 8)
    assert rank_environment(2)["OMP_NUM_THREADS"] == "4"
    assert rank_environment(16)["OMP_NUM_THREADS"] == "1"
