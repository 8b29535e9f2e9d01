"""One stand-alone script under ``zero-engine run``, and under DeepSpeed where it is installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import environment, run_program

SCRIPT = Path(__file__).parent / "scripts" / "deepspeed_loop.py"
EXACT = ("counts", "facts", "loaded", "missing", "rates", "tag")


def _by_deepspeed(stage: int, folder: Path) -> None:
    """Two ranks by torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), str(stage), "fp32", str(folder)],
        env={**environment(), "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def _flat(value: Any) -> list[Any]:
    return [x for inner in value for x in _flat(inner)] if isinstance(value, list) else [value]


@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed to compare with"
)
@pytest.mark.parametrize("stage", [1, 3])
def test_script_sees_the_same_training_as_under_deepspeed(stage: int, tmp_path: Path) -> None:
    for name in ("theirs", "ours"):
        (tmp_path / name).mkdir()
    _by_deepspeed(stage, tmp_path / "theirs")
    run_program(
        *("run", "--nproc-per-node=2", str(SCRIPT), str(stage), "fp32", str(tmp_path / "ours"))
    )
    theirs, ours = (
        json.loads((tmp_path / name / "result.json").read_text()) for name in ("theirs", "ours")
    )
    assert ours.keys() == theirs.keys()
    for key, expected in theirs.items():
        if key in EXACT:
            assert ours[key] == expected, key
        else:
            assert _flat(ours[key]) == pytest.approx(_flat(expected), rel=1e-5, abs=1e-7), key
