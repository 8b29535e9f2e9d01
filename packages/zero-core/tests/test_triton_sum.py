"""The fused sum's Triton kernels without a GPU: interpreted, or compiled only."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import warnings
from itertools import product
from pathlib import Path

import pytest
import torch

from zero_core.comm.fused_sum import sum_by_torch, sum_dtype
from zero_core.testing.ranks import alone

COMPILER = Path(__file__).parent / "support" / "triton_sum_compile_program.py"
INPUTS = {
    torch.float32: (torch.float32, torch.bfloat16, torch.float16),
    torch.bfloat16: (torch.float32, torch.bfloat16),
    torch.float16: (torch.float32, torch.float16),
    torch.float64: (torch.float64, torch.float32),
}
"""Gradient dtypes, each with the dtypes of its sum."""

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton isn't installed: it has no wheel for this system", allow_module_level=True)


def _run(act, slices, out_dtype):
    out = torch.empty(slices.shape[1], dtype=out_dtype)
    norm = torch.empty((), dtype=sum_dtype(out_dtype))
    nonfinite = torch.zeros(len(slices), dtype=torch.bool)
    act(slices, out, norm, nonfinite)
    return out, norm, nonfinite


def _spoil(slices):
    num_slices, numel = slices.shape
    slices[0, numel // 2] = torch.inf
    slices[-1, numel // 2] = -torch.inf
    slices[num_slices // 2, numel - 1] = torch.nan
    if num_slices > 1:
        slices[:, 0] = torch.finfo(slices.dtype).max


@alone
def test_interpreted_kernels_give_sum_norm_and_ranks_of_plain_torch():
    # Triton reads TRITON_INTERPRET on import. So forget all of its modules except compiled ones.
    os.environ["TRITON_INTERPRET"] = "1"
    for name in [n for n in sys.modules if n.partition(".")[0] == "triton" and "._C" not in n]:
        del sys.modules[name]
    from zero_core.comm.triton_sum import TILE, sum_by_triton

    # The interpreter runs on NumPy, which warns about NaN and overflow.
    warnings.simplefilter("ignore", RuntimeWarning)
    shapes = ((1, 1), (3, 37), (2, TILE), (5, 2 * TILE + 16), (8, 3 * TILE - 1))
    for (dtype, outs), shape in product(INPUTS.items(), shapes):
        slices = torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])).to(dtype)
        for is_spoilt, out_dtype in product((False, True), outs):
            if is_spoilt:
                _spoil(slices)
            total, norm, nonfinite = _run(sum_by_torch, slices, out_dtype)
            found = _run(sum_by_triton, slices, out_dtype)
            case = (dtype, out_dtype, shape, is_spoilt)
            assert torch.equal(found[0].nan_to_num(7.0), total.nan_to_num(7.0)), case
            assert math.isfinite(found[1]) == math.isfinite(norm), case
            assert not math.isfinite(norm) or torch.allclose(found[1], norm, rtol=1e-6, atol=0), (
                case
            )
            assert torch.equal(found[2], nonfinite), case


@pytest.mark.slow
def test_compiled_kernels_round_each_operation_and_move_sixteen_bytes_at_a_time(tmp_path):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRITON")}
    done = subprocess.run(
        [sys.executable, str(COMPILER)],
        env={**inherited, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout)
    kernels = {**compiled["cuda"], "fp64": compiled["fp64"], "norm": compiled["norm"]}
    for name, text in kernels.items():
        assert re.findall(r"\bfma\.|\.approx|\.ftz", text) == [], name
    for name, text in compiled["cuda"].items():
        assert set(re.findall(r"ld\.global\S*", text)) == {"ld.global.v4.b32"}, name
    assert "global_load_dwordx4" in compiled["hip"]["bf16 to fp32"]
