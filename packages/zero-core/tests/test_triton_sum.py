"""The fused sum's Triton kernels without a GPU: interpreted, or compiled but not run."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TIMEOUT_S = 300

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton isn't installed: it has no wheel for this system", allow_module_level=True)


def run_program(name, folder, **environment):
    """Run a program of this folder by itself and return the JSON that it prints.

    It needs a process of its own because triton reads its settings on import.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRITON")}
    done = subprocess.run(
        [sys.executable, str(HERE / name)],
        env={**inherited, "TRITON_CACHE_DIR": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_interpreted_kernels_give_sum_norm_and_ranks_of_plain_torch(tmp_path):
    found = run_program("triton_sum_program.py", tmp_path, TRITON_INTERPRET="1")
    assert found["cases"] == 90
    assert found["wrong"] == []


@pytest.mark.slow
def test_compiled_kernels_round_each_operation_and_move_sixteen_bytes_at_a_time(tmp_path):
    compiled = run_program("support/triton_sum_compile_program.py", tmp_path)
    kernels = {**compiled["cuda"], "fp64": compiled["fp64"], "norm": compiled["norm"]}
    for name, text in kernels.items():
        assert re.findall(r"\bfma\.|\.approx|\.ftz", text) == [], name
    for name, text in compiled["cuda"].items():
        assert set(re.findall(r"ld\.global\S*", text)) == {"ld.global.v4.b32"}, name
    assert "global_load_dwordx4" in compiled["hip"]["bf16 to fp32"]
