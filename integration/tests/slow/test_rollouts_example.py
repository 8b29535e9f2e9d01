"""The example of rollouts runs as its docstring says, on two ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "rollouts.py"


def test_a_model_in_another_process_follows_by_patches(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", EXAMPLE]
    result = subprocess.run(
        [*command, tmp_path / "rollouts"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    lines = re.findall(r"version (\d): (\d+) bytes, the same bits there", result.stdout)
    assert [int(number) for number, _ in lines] == [1, 2, 3, 4]
    assert all(int(nbytes) < 1_400_000 for _, nbytes in lines)  # a tenth of the model
