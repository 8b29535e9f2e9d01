"""Runs of the train program that several tests look at. Each is made once per test session."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from zero_engine.settings import RunFolder

# Small enough that a run is mostly start-up.
TINY = (
    "--layers=2",
    "--width=32",
    "--heads=2",
    "--context=32",
    "--vocab=300",
    "--eval-every=20",
    "--eval-windows=16",
    "--save-every=50",
    "--ranks=2",
)
TIME_LIMIT_S = 150

Program = Callable[..., "subprocess.CompletedProcess[str]"]


def command(*arguments: str) -> list[str]:
    """The command line that runs ``zero-engine ARGUMENTS`` with this interpreter."""
    return [sys.executable, "-m", "zero_engine", *arguments]


def environment() -> dict[str, str]:
    """This process's environment, one thread per rank, no downloads."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run_program(*arguments: str, expected_code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run ``zero-engine ARGUMENTS`` to its end."""
    done = subprocess.run(
        command(*arguments),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    assert done.returncode == expected_code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few hundred kilobytes of text."""
    root = Path(sysconfig.get_path("stdlib"))
    texts = [(root / f"{name}.py").read_text(encoding="utf-8") for name in ("argparse", "typing")]
    path = tmp_path_factory.mktemp("text") / "some.txt"
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny_options(text_file: Path) -> tuple[str, ...]:
    """Options of a tiny run with the default configuration: stage 3, Twin-Flow, qwZ."""
    return (*TINY, f"--data={text_file}", "--steps=160")


@pytest.fixture(scope="session")
def finished_run(
    tmp_path_factory: pytest.TempPathFactory, tiny_options: tuple[str, ...]
) -> tuple[RunFolder, str]:
    """A run that went through without a stop, and what it printed."""
    root = tmp_path_factory.mktemp("runs") / "straight"
    done = run_program("train", *tiny_options, f"--output={root}")
    return RunFolder(root), done.stdout + done.stderr
