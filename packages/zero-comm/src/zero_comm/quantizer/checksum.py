"""Checksum of bytes, computed on the device that holds them.

The checksum is the sum modulo 2**64 of mixed 64-bit words, each multiplied by two odd numbers.
Words are grouped into turns of 1,024. One factor depends on the word's position in its turn, the
other is ``2 k + 1`` in turn k. Mixing (shift, multiply, shift) is invertible and spreads a word's
highest bits. Without mixing, sign changes of a whole column of weights would cancel. A single
changed word is always detected, and several accidental changes with probability 1 - 2**-64.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Final

import torch
from torch import Tensor

from zero_comm.quantizer.backend import backend

# The native and the Triton kernels use the same constants.
WORDS_PER_TURN: Final = 1024
ODD: Final = -7046029254386353131  # golden ratio: ``k * ODD | 1`` is the factor of a turn's word k
MIX: Final = -2960836687051489901  # 0xd6e8feb86659fd93, the multiplier of Degski's 64-bit mixer
LOW_HALF: Final = 0xFFFFFFFF  # clears the sign bits after a right shift by 32
_TURNS_AT_ONCE: Final = 256  # bounds the workspace to 2 MiB


def checksums(rows: Tensor) -> Tensor:
    """Return the checksum of each row of bytes: int64, on the device of ``rows``.

    ``rows`` is 1-D (one row), 2-D or 3-D. Each row is contiguous, at a multiple of 8 bytes, and a
    multiple of 8 bytes long.
    """
    if rows.dim() == 1:
        return checksums(rows[None])[0]
    if rows.dim() == 3:
        return torch.stack([checksums(group) for group in rows])
    words, name = rows.view(torch.int64), backend(rows.device)
    if name == "triton":
        found: Tensor = import_module("zero_comm.quantizer.triton_checksum").sum_words(words)
        return found
    odd = _odd_numbers(words.device)
    if name == "native":
        sum_words = import_module("zero_comm.quantizer.native_backend").sum_words
        return torch.tensor([sum_words(row, odd) for row in words], dtype=torch.int64)
    total = torch.zeros(len(words), dtype=torch.int64, device=words.device)
    size = WORDS_PER_TURN * _TURNS_AT_ONCE
    for chunk, part in enumerate(torch.split(words, size, -1)):
        turns = torch.arange(_TURNS_AT_ONCE, device=words.device) + chunk * _TURNS_AT_ONCE
        factors = (odd * (2 * turns + 1)[:, None]).flatten()[: part.shape[-1]]
        mixed = (part ^ ((part >> 32) & LOW_HALF)) * MIX
        total += ((mixed ^ ((mixed >> 32) & LOW_HALF)) * factors).sum(-1)
    return total


def checksum_of(values: Tensor) -> Tensor:
    """Return the checksum of the bytes of ``values``: an int64 scalar on their device.

    ``values`` are 1-D and contiguous, at any address. Zeros pad their bytes to a multiple of 8.
    """
    whole = values.view(torch.uint8)
    # torch refuses an int64 view at a storage offset that is not a multiple of 8, even if empty.
    if whole.numel() % 8 or whole.data_ptr() % 8 or whole.storage_offset() % 8:
        padded = torch.zeros(-(-whole.numel() // 8) * 8, dtype=torch.uint8, device=values.device)
        padded[: whole.numel()] = whole
        whole = padded
    return checksums(whole)


@cache
def _odd_numbers(device: torch.device) -> Tensor:
    # The copy from the host blocks, so the result is safe on every stream.
    count = torch.arange(WORDS_PER_TURN, dtype=torch.int64, device="cpu")
    return ((count * ODD) | 1).to(device)
