"""Compilation of the Triton kernels for GPUs that need not be present."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.backends import HAS_TRITON

PROGRAM = Path(__file__).with_name("triton_compile_program.py")
TIMEOUT_S = 600
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_TRITON, reason="Triton has no wheel for this system"),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run `PROGRAM` in a new process and return the JSON that it prints.

    Triton reads its settings at import, and this process may have imported it for the interpreter.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRITON")}
    done = subprocess.run(
        [sys.executable, str(PROGRAM)],
        env={**inherited, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_compiled_kernels_round_every_operation_by_itself_and_all_compile_for_each_gpu(
    compiled: Any,
) -> None:
    for name, text in compiled["cuda"].items():
        assert re.findall(r"\bfma\.|\.approx|\.ftz", text) == [], name
        assert "div.rn.f32" in text, name
    assert "v_div_fixup_f32" in compiled["hip"]["encode rotated"]
    assert (len(compiled["lossless"]), len(compiled["checksums"])) == (36, 3)
