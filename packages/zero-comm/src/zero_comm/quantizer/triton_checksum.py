"""Triton kernel for the checksum of `zero_comm.quantizer.checksum`, in one pass over the words."""

# No `from __future__ import annotations`: Triton reads the annotations of the kernels.
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from zero_comm.quantizer import checksum
from zero_comm.quantizer.triton_backend import on_device

TURNS: Final = 4  # turns that one program sums
WORDS = tl.constexpr(checksum.WORDS_PER_TURN)
ODD = tl.constexpr(checksum.ODD)
MIX = tl.constexpr(checksum.MIX)
LOW_HALF = tl.constexpr(checksum.LOW_HALF)


@triton.jit(
    do_not_specialize=["num_words", "row_stride"], do_not_specialize_on_alignment=["words_ptr"]
)
def sum_kernel(
    words_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    num_words: tl.tensor,
    row_stride: tl.tensor,
    TURNS: tl.constexpr,
) -> None:
    # All programs of all rows are along one axis, because CUDA limits the others to 65,535.
    per_row = tl.cdiv(num_words.to(tl.int64), TURNS * WORDS).to(tl.int32)
    row = tl.program_id(0) // per_row
    program = (tl.program_id(0) - row * per_row).to(tl.int64)
    words_ptr += row.to(tl.int64) * row_stride
    place = tl.arange(0, WORDS).to(tl.int64)
    total = tl.zeros([WORDS], tl.int64)
    first = program * (TURNS * WORDS)
    num_inside = num_words - first
    if num_inside < TURNS * WORDS:
        for turn in tl.static_range(TURNS):
            at = turn * WORDS + place
            words = tl.load(words_ptr + first + at, mask=at < num_inside, other=0)
            total += _mixed(words) * (2 * (program * TURNS + turn) + 1)
    else:
        for turn in tl.static_range(TURNS):
            words = tl.load(words_ptr + first + turn * WORDS + place)
            total += _mixed(words) * (2 * (program * TURNS + turn) + 1)
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total * ((place * ODD) | 1)))


@triton.jit
def _mixed(words: tl.tensor) -> tl.tensor:
    words = (words ^ ((words >> 32) & LOW_HALF)) * MIX
    return words ^ ((words >> 32) & LOW_HALF)


def sum_words(words: Tensor) -> Tensor:
    """Return the checksums of rows of int64 ``words`` on their device, without waiting for it."""
    num_rows, num_words = words.shape
    num_programs = triton.cdiv(num_words, TURNS * checksum.WORDS_PER_TURN)
    sums = torch.empty(num_rows, num_programs, dtype=torch.int64, device=words.device)
    if sums.numel():
        with on_device(words.device):
            sum_kernel[(num_rows * num_programs,)](
                words, sums, num_words, words.stride(0), TURNS=TURNS, num_warps=4
            )
    return sums.sum(1)
