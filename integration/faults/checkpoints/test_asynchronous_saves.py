"""A program that is killed while it saves beside training leaves its earlier checkpoints whole."""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch

from faults.harness import Program
from zero_core.checkpoint.files import find, read_weights

SCRIPT = str(Path(__file__).with_name("saving_program.py"))
STEPS = 40
KILLS = 12


def _program(folder: Path) -> Program:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    return Program(*launcher, SCRIPT, str(folder), str(STEPS))


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the newest checkpoint's weights. A damaged one raises."""
    return {weight.names[0]: weight.value for weight in read_weights(folder)}


def _newest(folder: Path) -> str:
    return find(folder, None).name if folder.joinpath("latest").exists() else ""


def test_killed_at_any_moment_the_newest_checkpoint_is_whole_and_training_ends_with_the_same_bits(
    tmp_path: Path,
) -> None:
    with _program(tmp_path / "straight") as straight:
        assert straight.end() == 0, straight.output
    folder, moments = tmp_path / "killed", random.Random(0)
    for _ in range(KILLS):
        before = _newest(folder)
        with _program(folder) as program:
            program.wait_for(lambda before=before: _newest(folder) != before)
            time.sleep(moments.uniform(0.0, 0.1))
            program.kill_all()
        found = _newest(folder)
        assert _weights(folder), found
        if found == f"step-{STEPS}":
            break
    with _program(folder) as last:
        assert last.end() == 0, last.output
    assert _newest(folder) == f"step-{STEPS}"
    theirs = _weights(tmp_path / "straight")
    for name, value in _weights(folder).items():
        assert torch.equal(value, theirs[name]), name
    left = list(folder.glob(".*"))  # ranks' marks, which stay for a day
    assert all(path.is_file() and not path.stat().st_size for path in left), left
