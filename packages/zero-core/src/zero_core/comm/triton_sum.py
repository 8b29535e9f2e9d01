"""Triton kernels of `zero_core.comm.fused_sum`: a sum in rank order and its statistics.

Each program adds one **tile** of all slices. For the norm, it writes the sum of squares of its tile
to a separate element, and a second kernel adds these in a fixed order, so the norm does not depend
on the programs' order. If any addend is non-finite, so is the sum. Only tiles with a non-finite sum
are read again, to find the ranks of non-finite slices.
"""

# No `from __future__ import annotations`: Triton reads the kernels' annotations.
from contextlib import nullcontext
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE: Final = 2048  # 16 elements per thread: for 16-bit dtypes, two 16-byte loads per slice
NORM_TILE: Final = 4096
DTYPE_NAMES: Final = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
}
# No fused multiply-add, so that Triton's interpreter computes the same bits of the norm.
LAUNCH_OPTIONS: Final[dict[str, Any]] = {"enable_fp_fusion": False, "num_warps": 4}


def sum_by_triton(
    slices: Tensor, out: Tensor, norm: Tensor | None, nonfinite: Tensor | None
) -> None:
    """Compute `zero_core.comm.fused_sum.sum_slices` by two kernels, or by one without ``norm``."""
    numel = out.numel()
    num_tiles = triton.cdiv(numel, TILE)
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    squares = torch.empty(0 if norm is None else num_tiles, dtype=wide, device=out.device)
    flags = squares if nonfinite is None else nonfinite.view(torch.uint8)
    here = out.device  # Triton launches on the current device
    with nullcontext() if here.type == "cpu" else torch.accelerator.device_index(here.index):
        sum_kernel[(num_tiles,)](
            _typed(slices),
            _typed(out),
            squares,
            flags,
            numel,
            len(slices),
            DTYPE=DTYPE_NAMES[slices.dtype],
            OUT_DTYPE=DTYPE_NAMES[out.dtype],
            HAS_NORM=norm is not None,
            HAS_FLAGS=nonfinite is not None,
            TILE=TILE,
            **LAUNCH_OPTIONS,
        )
        if norm is not None:
            norm_kernel[(1,)](squares, norm, num_tiles, TILE=NORM_TILE, **LAUNCH_OPTIONS)


# ``numel`` stays specialized on divisibility by 16, which allows vector loads. The flags may be at
# any address, so specialization on their alignment could compile a kernel during backward.
@triton.jit(do_not_specialize=["num_slices"], do_not_specialize_on_alignment=["nonfinite_ptr"])
def sum_kernel(
    slices_ptr: tl.tensor,
    out_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    nonfinite_ptr: tl.tensor,
    numel: tl.tensor,
    num_slices: tl.tensor,
    DTYPE: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_FLAGS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    tile = tl.program_id(0).to(tl.int64)
    offsets = tile * TILE + tl.arange(0, TILE)
    is_inside = offsets < numel
    row_ptr = slices_ptr
    total = _load(row_ptr + offsets, is_inside, DTYPE)
    for _ in range(1, num_slices):
        row_ptr += numel
        total += _load(row_ptr + offsets, is_inside, DTYPE)
    if OUT_DTYPE == "bf16":
        bits = total.to(tl.float32).to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # ties to even
        # Rounding could overflow a NaN's bits to zero.
        bits = tl.where(total == total, bits, 0x7FC0)
        tl.store(out_ptr + offsets, bits.to(tl.int16), mask=is_inside)
        stored = (bits << 16).to(tl.float32, bitcast=True)
    else:
        rounded = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + offsets, rounded, mask=is_inside)
        stored = rounded.to(squares_ptr.dtype.element_ty)
    if HAS_NORM:
        tl.store(squares_ptr + tile, tl.sum(stored * stored, axis=0))
    if HAS_FLAGS:
        if _has_nonfinite(total, DTYPE):
            row_ptr = slices_ptr
            for rank in range(num_slices):
                part = _load(row_ptr + offsets, is_inside, DTYPE)
                if _has_nonfinite(part, DTYPE):
                    tl.store(nonfinite_ptr + rank, 1)  # all programs write the same value
                row_ptr += numel


@triton.jit(do_not_specialize=["num_tiles"])
def norm_kernel(
    squares_ptr: tl.tensor, norm_ptr: tl.tensor, num_tiles: tl.tensor, TILE: tl.constexpr
) -> None:
    """Write the square root of the total of all tiles' sums of squares, added in float64."""
    total = tl.zeros([TILE], tl.float64)
    for start in range(0, num_tiles, TILE):
        place = start + tl.arange(0, TILE)
        total += tl.load(squares_ptr + place, mask=place < num_tiles, other=0.0).to(tl.float64)
    tl.store(norm_ptr, tl.sqrt(tl.sum(total, axis=0)))


@triton.jit
def _load(ptrs: tl.tensor, mask: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Load elements as fp32, or as float64 if ``DTYPE`` is "fp64". Masked elements are 0."""
    raw = tl.load(ptrs, mask=mask, other=0)
    if DTYPE == "bf16":
        return (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == "fp16":
        return raw.to(tl.float32)
    else:
        return raw


@triton.jit
def _has_nonfinite(x: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Return whether ``x`` contains NaN or Inf. It is float64 if ``DTYPE`` is "fp64", else fp32."""
    if DTYPE == "fp64":
        bits = x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
        return tl.max(bits, axis=0) >= 0x7FF0000000000000
    else:
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        return tl.max(bits, axis=0) >= 0x7F800000


def _typed(x: Tensor) -> Tensor:
    """View bfloat16 as int16. The kernels convert the bits themselves."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x
