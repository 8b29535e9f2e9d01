"""Triton kernels of `zero_core.comm.fused_sum`: a sum in rank order and its statistics.

A program adds one **tile** of all slices. It writes the tile's square sum to a place of its own;
a second kernel adds these in order, so that the norm does not depend on the order of programs. A
sum that has a non-finite term is not finite: only such a tile is read again, to find the ranks.
"""

# No `from __future__ import annotations`: Triton reads the annotations of the kernels.
from contextlib import nullcontext
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE: Final = 2048  # 16 elements per thread: two loads of 16 bytes of each slice in 16 bits
NORM_TILE: Final = 4096
DTYPE_NAMES: Final = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
}
# The norm has the same bits in the interpreter: no multiply-add fused into one rounding.
LAUNCH_OPTIONS: Final[dict[str, Any]] = {"enable_fp_fusion": False, "num_warps": 4}


def sum_by_triton(
    slices: Tensor, out: Tensor, norm: Tensor | None, nonfinite: Tensor | None
) -> None:
    """Do `zero_core.comm.fused_sum.sum_slices` in two launches, or one without ``norm``."""
    numel = out.numel()
    num_tiles = triton.cdiv(numel, TILE)
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    squares = torch.empty(0 if norm is None else num_tiles, dtype=wide, device=out.device)
    flags = squares if nonfinite is None else nonfinite.view(torch.uint8)
    here = out.device  # Triton launches on the current one
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


# ``numel`` is specialized on divisibility by 16 alone: then whole vectors are loaded. The flags may
# be a part of a vector, at any address, and nothing may be compiled during backward.
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
    """Sum one tile of all slices. bf16 elements are passed as int16."""
    tile = tl.program_id(0).to(tl.int64)
    offsets = tile * TILE + tl.arange(0, TILE)
    is_inside = offsets < numel
    row_ptr = slices_ptr
    total = _load(row_ptr + offsets, is_inside, DTYPE)
    for _ in range(1, num_slices):
        row_ptr += numel
        total += _load(row_ptr + offsets, is_inside, DTYPE)
    if OUT_DTYPE == "bf16":
        bits = _bfloat16_bits(total.to(tl.float32))
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
                    tl.store(nonfinite_ptr + rank, 1)  # whoever else writes it writes the same
                row_ptr += numel


@triton.jit(do_not_specialize=["num_tiles"])
def norm_kernel(
    squares_ptr: tl.tensor, norm_ptr: tl.tensor, num_tiles: tl.tensor, TILE: tl.constexpr
) -> None:
    """Write the root of the sum of all square sums, added in float64 by one program."""
    total = tl.zeros([TILE], tl.float64)
    for start in range(0, num_tiles, TILE):
        place = start + tl.arange(0, TILE)
        total += tl.load(squares_ptr + place, mask=place < num_tiles, other=0.0).to(tl.float64)
    tl.store(norm_ptr, tl.sqrt(tl.sum(total, axis=0)))


@triton.jit
def _load(ptrs: tl.tensor, mask: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Load elements as fp32, or as float64 where they are."""
    raw = tl.load(ptrs, mask=mask, other=0)
    if DTYPE == "bf16":
        return (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == "fp16":
        return raw.to(tl.float32)
    else:
        return raw


@triton.jit
def _has_nonfinite(x: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Whether any element of fp32 or float64 ``x`` is NaN or Inf, by the bits of its exponent."""
    if DTYPE == "fp64":
        bits = x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
        return tl.max(bits, axis=0) >= 0x7FF0000000000000
    else:
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        return tl.max(bits, axis=0) >= 0x7F800000


@triton.jit
def _bfloat16_bits(x: tl.tensor) -> tl.tensor:
    """Round fp32 ``x`` to bfloat16, ties to even, and return its 16 bits in an int32."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0)  # or NaN's bits might carry over into zero


def _typed(x: Tensor) -> Tensor:
    """View bfloat16 as int16: the kernels convert it themselves."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x
