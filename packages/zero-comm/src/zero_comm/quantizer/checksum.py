"""A checksum of bytes that runs on the device that holds them.

It is a sum of mixed 64-bit words modulo 2**64, each times two odd numbers that depend on its place:
one of 1,024 in turn, and ``2 k + 1`` in the k-th turn. A word is mixed without loss (shift,
multiply, shift) before, so that a change of its highest bits reaches all of the sum's: the signs of
a column of weights would cancel otherwise. Every single changed word is detected, and several with
a probability of 1 - 2**-64, unless someone looks for ones that cancel.
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
    """Return the checksum of each row of bytes: int64, on their device.

    Rows are contiguous, at multiples of 8 bytes, and a multiple of 8 long.
    """
    words = rows.view(torch.int64)
    name, odd = backend(words.device), _odd_numbers(words.device)
    groups = words[(None,) * (3 - words.dim())]  # kernels take one row, or a matrix of rows
    if name == "native":
        native = import_module("zero_comm.quantizer.native_backend")
        sums = [native.sum_words(row, odd) for group in groups for row in group]
        return torch.tensor(sums, dtype=torch.int64).view(words.shape[:-1])
    total = torch.zeros(words.shape[:-1], dtype=torch.int64, device=words.device)
    if name == "triton":
        kernel = import_module("zero_comm.quantizer.triton_checksum")
        for sums_of_group, group in zip(total.view(groups.shape[:2]), groups, strict=True):
            sums_of_group.copy_(kernel.sum_words(group))
        return total
    size = WORDS_PER_TURN * _TURNS_AT_ONCE
    for chunk, part in enumerate(torch.split(words, size, -1)):
        turns = torch.arange(_TURNS_AT_ONCE, device=words.device) + chunk * _TURNS_AT_ONCE
        factors = (odd * (2 * turns + 1)[:, None]).flatten()[: part.shape[-1]]
        total += (_mixed(part) * factors).sum(-1)
    return total


def checksum_of(values: Tensor) -> Tensor:
    """Return the checksum of the bytes of any values, zero-padded to a multiple of 8 bytes.

    The values are 1-D, contiguous, at any address. The checksum is int64, 0-dim, on their device.
    """
    whole = values.view(torch.uint8)
    # torch views words only at an offset of whole words, even where there are none.
    if whole.numel() % 8 or whole.data_ptr() % 8 or whole.storage_offset() % 8:
        padded = torch.zeros(-(-whole.numel() // 8) * 8, dtype=torch.uint8, device=values.device)
        padded[: whole.numel()] = whole
        whole = padded
    return checksums(whole)


def _mixed(words: Tensor) -> Tensor:
    words = (words ^ ((words >> 32) & LOW_HALF)) * MIX
    return words ^ ((words >> 32) & LOW_HALF)


@cache
def _odd_numbers(device: torch.device) -> Tensor:
    # Made on the host, and copied while it waits: any stream may read them.
    count = torch.arange(WORDS_PER_TURN, dtype=torch.int64, device="cpu")
    return ((count * ODD) | 1).to(device)
