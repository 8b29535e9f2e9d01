"""In 10**5 healthy steps no rank is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_no_rank_is_named_in_a_hundred_thousand_healthy_steps() -> None:
    program = ROOT / "packages/zero-core/tests/test_watch.py"
    done = subprocess.run(
        [sys.executable, program, "100000"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("100000 steps, ")
    assert done.stdout.endswith(", 0 lines\n")
