"""A worker of the Ray example is killed: Ray starts the others again, with the same result."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from faults.harness import Program

pytest.importorskip("ray", reason="the optional ray is not installed")

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"


def _workers(program: Program) -> list[int]:
    """Return the processes of Ray's workers, which are named after their class."""
    found = []
    for pid in program.descendants():
        with suppress(OSError):  # it has ended meanwhile
            if b"ray::RayTrainWorker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def _weights(folder: Path) -> dict[str, bytes]:
    last = folder / "checkpoints" / "step-64"
    return {path.name: path.read_bytes() for path in last.glob("*.safetensors")}


def test_run_goes_on_with_the_same_bits_after_a_worker_was_killed(tmp_path: Path) -> None:
    """The oracle is a run in which nothing happens."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    with Program(str(EXAMPLE), str(straight)) as program:
        assert program.end() == 0, program.output
    with Program(str(EXAMPLE), str(killed)) as program:
        saved = killed / "checkpoints" / "latest"
        program.wait_for(lambda: len(_workers(program)) == 2)
        first = _workers(program)
        program.wait_for(saved.exists)
        os.kill(first[-1], signal.SIGKILL)
        assert not (killed / "checkpoints" / "step-64").exists(), "it was killed too late"
        program.wait_for(lambda: len({*_workers(program)} - {*first}) == 2)
        assert program.end() == 0, program.output
    assert len(_weights(straight)) > 0
    assert _weights(killed) == _weights(straight)
