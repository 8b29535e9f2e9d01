"""Holds the Triton kernels of a reduction against plain torch, in Triton's interpreter.

Started as ``python triton_sum_program.py`` with ``TRITON_INTERPRET=1``, which triton reads as it is
imported. Prints a JSON object: the number of cases and what differed.
"""

import json
import math
import warnings
from itertools import product

import torch
from torch import Tensor

from zero_core.comm.fused_sum import sum_by_torch, sum_dtype
from zero_core.comm.triton_sum import DTYPE_NAMES, TILE, sum_by_triton

INPUTS = {
    torch.float32: (torch.float32, torch.bfloat16, torch.float16),
    torch.bfloat16: (torch.float32, torch.bfloat16),
    torch.float16: (torch.float32, torch.float16),
    torch.float64: (torch.float64, torch.float32),
}
"""Dtypes of gradients, and those that they accumulate in."""
SHAPES = ((1, 1), (3, 37), (2, TILE), (5, 2 * TILE + 16), (8, 3 * TILE - 1))


def run(slices: Tensor, out_dtype: torch.dtype, act: object) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.empty(slices.shape[1], dtype=out_dtype)
    norm = torch.empty((), dtype=sum_dtype(out_dtype))
    nonfinite = torch.zeros(len(slices), dtype=torch.bool)
    act(slices, out, norm, nonfinite)  # type: ignore[operator]
    return out, norm, nonfinite


def spoil(slices: Tensor) -> None:
    """NaN, Inf of both signs that cancel to NaN, and a sum that overflows where no part does."""
    num_slices, numel = slices.shape
    slices[0, numel // 2] = torch.inf
    slices[-1, numel // 2] = -torch.inf
    slices[num_slices // 2, numel - 1] = torch.nan
    if num_slices > 1:
        slices[:, 0] = torch.finfo(slices.dtype).max


def compare(slices: Tensor, out_dtype: torch.dtype) -> list[str]:
    expected = run(slices, out_dtype, sum_by_torch)
    found = run(slices, out_dtype, sum_by_triton)
    name = f"{DTYPE_NAMES[slices.dtype]} to {DTYPE_NAMES[out_dtype]} {list(slices.shape)}"
    wrong = []
    if not torch.equal(found[0].nan_to_num(7.0), expected[0].nan_to_num(7.0)):
        wrong.append(f"{name}: sum")
    if not math.isfinite(expected[1]):
        wrong += [] if not math.isfinite(found[1]) else [f"{name}: norm is finite"]
    elif not torch.allclose(found[1], expected[1], rtol=1e-6, atol=0.0):
        wrong.append(f"{name}: norm {found[1]}, expected {expected[1]}")
    if not torch.equal(found[2], expected[2]):
        wrong.append(f"{name}: ranks {found[2].tolist()}, expected {expected[2].tolist()}")
    return wrong


def main() -> None:
    """Run all cases."""
    torch.set_num_threads(1)
    # NumPy, which interprets, warns of NaN and of overflow, which are meant here.
    warnings.simplefilter("ignore", RuntimeWarning)
    wrong: list[str] = []
    num_cases = 0
    for (dtype, outs), shape in product(INPUTS.items(), SHAPES):
        slices = torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])).to(dtype)
        for is_spoilt, out_dtype in product((False, True), outs):
            if is_spoilt:
                spoil(slices)
            wrong += compare(slices, out_dtype)
            num_cases += 1
    print(json.dumps({"cases": num_cases, "wrong": wrong}))


if __name__ == "__main__":
    main()
