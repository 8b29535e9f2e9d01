"""The checksum of `zero_comm.quantizer.checksum` by a Triton kernel, in one pass over the words."""

# No `from __future__ import annotations`: Triton reads the annotations of the kernels.
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from zero_comm.quantizer.triton_backend import on_device

WORDS: Final = 1024
"""Words of a turn."""
TURNS: Final = 4
"""Turns that a program sums up."""


@triton.jit(do_not_specialize=["num_words"])
def sum_kernel(
    words_ptr: tl.tensor,
    odd_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    num_words: tl.tensor,
    WORDS: tl.constexpr,
    TURNS: tl.constexpr,
) -> None:
    """Store the weighted sum of a program's turns. ``odd_ptr`` has the odd numbers of a turn."""
    program = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WORDS)
    total = tl.zeros([WORDS], tl.int64)
    for turn in tl.static_range(TURNS):
        k = program * TURNS + turn
        at = k * WORDS + place
        total += tl.load(words_ptr + at, mask=at < num_words, other=0) * (2 * k + 1)
    tl.store(sums_ptr + program, tl.sum(total * tl.load(odd_ptr + place)))


def sum_words(words: Tensor, odd: Tensor) -> Tensor:
    """Return the checksum of 1-D int64 ``words``, on their device, without waiting for it.

    Args:
        words: contiguous.
        odd: the odd numbers of a turn, int64, on the same device.

    Returns:
        int64, without dimensions.
    """
    num_programs = triton.cdiv(words.numel(), WORDS * TURNS)
    sums = torch.empty(num_programs, dtype=torch.int64, device=words.device)
    if num_programs:
        with on_device(words.device):
            sum_kernel[(num_programs,)](
                words, odd, sums, words.numel(), WORDS=WORDS, TURNS=TURNS, num_warps=4
            )
    return sums.sum()
