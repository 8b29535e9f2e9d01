"""A checksum of bytes that runs on the device that holds them.

It is a sum of 64-bit words modulo 2**64, each times two odd numbers that depend on its place: one
of 1,024 in turn, and ``2 k + 1`` in the k-th turn. It detects every changed word and nearly every
exchange of two. It detects accidents, not forgeries.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Final

import torch
from torch import Tensor

from zero_comm.quantizer.backend import find_backend_name

_WORDS_PER_TURN: Final = 1024
_TURNS_AT_ONCE: Final = 256  # bounds the workspace to 2 MiB


def checksums(rows: Tensor) -> Tensor:
    """Return the checksum of each row of bytes.

    Args:
        rows: uint8, [..., bytes]; rows are contiguous, at multiples of 8 bytes, and a multiple of 8
            long.

    Returns:
        int64, [...], on the device of ``rows``.
    """
    words = rows.view(torch.int64)
    name = find_backend_name(rows.device)
    if name != "torch":
        return _sums_by_row(words, name)
    total = torch.zeros(words.shape[:-1], dtype=torch.int64, device=words.device)
    odd = _odd_numbers(words.device)
    size = _WORDS_PER_TURN * _TURNS_AT_ONCE
    for chunk, part in enumerate(torch.split(words, size, -1)):
        turns = torch.arange(_TURNS_AT_ONCE, device=words.device) + chunk * _TURNS_AT_ONCE
        factors = (odd * (2 * turns + 1)[:, None]).flatten()[: part.shape[-1]]
        total += (part * factors).sum(-1)
    return total


def checksum_of(values: Tensor) -> Tensor:
    """Return the checksum of the bytes of any values, as of zeros after them to a multiple of 8.

    Args:
        values: 1-D, contiguous, at any address.

    Returns:
        int64, without dimensions, on the device of ``values``.
    """
    whole = values.view(torch.uint8)
    # torch views words only at an offset of whole words, even where there are none.
    if whole.numel() % 8 or whole.data_ptr() % 8 or whole.storage_offset() % 8:
        padded = torch.zeros(-(-whole.numel() // 8) * 8, dtype=torch.uint8, device=values.device)
        padded[: whole.numel()] = whole
        whole = padded
    return checksums(whole)


def _sums_by_row(words: Tensor, backend: str) -> Tensor:
    """Return what `checksums` does, by a kernel of the backend."""
    if words.dim() > 1:
        sums = [_sums_by_row(row, backend) for row in words]
        return torch.stack(sums) if sums else words.new_zeros(words.shape[:-1])
    odd = _odd_numbers(words.device)
    if backend == "native":
        native = import_module("zero_comm.quantizer.native_backend")
        return torch.tensor(native.sum_words(words, odd))
    found: Tensor = import_module("zero_comm.quantizer.triton_checksum").sum_words(words, odd)
    return found


@cache
def _odd_numbers(device: torch.device) -> Tensor:
    count = torch.arange(_WORDS_PER_TURN, dtype=torch.int64, device=device)
    # An odd number with mixed bits for each place (the golden ratio's fraction in 64 bits).
    return (count * -7046029254386353131) | 1
