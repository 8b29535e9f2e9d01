"""A command ends well when its reader has left, and refuses before it starts ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from faults.harness import END_S, ENVIRONMENT

NOBODY_READS = 1
"""Exit code of a command whose output is closed."""


def _start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "zero_engine", *arguments]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT},
    )


@pytest.mark.parametrize("verb", ["plan --layers 1", "config", "doctor", "--help"])
def test_reader_that_has_left_causes_no_traceback(verb: str) -> None:
    with _start(*verb.split()) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        command.stdout.close()  # before anything is written
        said = command.stderr.read()  # libraries may warn as they are imported
        assert "Traceback" not in said
        assert "Pipe" not in said
    assert command.returncode == NOBODY_READS


def test_wrong_configuration_starts_no_ranks(tmp_path: Path) -> None:
    config = tmp_path / "zero.json"
    config.write_text('{"train_batch_size": 8, "optimizer": {"type": "Adamm"}}')
    begin = time.monotonic()
    command = _start("train", f"--config={config}", f"--output={tmp_path / 'run'}", "--ranks=2")
    _, errors = command.communicate(timeout=END_S)
    print(f"refused after {time.monotonic() - begin:.1f} s")
    assert command.returncode == 2
    assert len(errors.splitlines()) == 1, errors
    assert "optimizer.type = 'Adamm'" in errors
    assert not (tmp_path / "run").exists()
