"""A command ends well when its reader has left, and refuses before it starts ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def _run(*arguments: str, shell: str = "") -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "zero_engine", *arguments]
    return subprocess.run(
        ["bash", "-c", f"{' '.join(words)} {shell}"],
        capture_output=True,
        text=True,
        env=HERE,
        check=False,
        timeout=300,
    )


@pytest.mark.parametrize("verb", ["plan --layers 1", "config", "doctor", "--help"])
def test_reader_that_has_left_causes_no_traceback(verb: str) -> None:
    done = _run(*verb.split(), shell="| head -1")
    assert done.stdout
    assert "Traceback" not in done.stderr, done.stderr


def test_wrong_configuration_starts_no_ranks(tmp_path: Path) -> None:
    config = tmp_path / "zero.json"
    config.write_text('{"train_batch_size": 8, "optimizer": {"type": "Adamm"}}')
    begin = time.monotonic()
    done = _run("train", f"--config={config}", f"--output={tmp_path / 'run'}", "--ranks=2")
    print(f"refused after {time.monotonic() - begin:.1f} s")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "optimizer.type = 'Adamm'" in done.stderr
    assert not (tmp_path / "run").exists()
