"""Encodings of sets of positions, and the comparison that finds them.

A set of positions in ``[0, numel)`` is encoded as one of

- *gaps*: uint8. Each position is the number of unchanged ones since the last one; 255 stands for
  255 of them and no position. About a byte per position where a fiftieth or less is in the set.
- *bits*: uint8, one bit per position, the lowest first.
- *all*: nothing.

[Note: low bits]
A changed 16-bit value is mostly a neighbour of the old one. *Ordered*, as the integers that count
the values of a dtype from the lowest on, both then differ by little, and the lowest bits of the new
one are enough for somebody who has the old one, or any in between: the new one is the nearest with
these bits. 4 bits serve a distance up to 7, and 8 bits one up to 127.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

_MORE = 255
_LITTLE = 8  # bits of a byte, and elements per byte of bits
# Gathers the lowest bits of the 8 bytes of an int64 in its highest byte.
_GATHER_BITS = 0x0102040810204080


class Kind(StrEnum):
    """Encoding of a set of positions."""

    GAPS = "gaps"
    BITS = "bits"
    ALL = "all"


class Form(StrEnum):
    """Part of the values that is sent."""

    VALUES = "values"
    LOW4 = "low4"
    LOW8 = "low8"

    @property
    def num_bits(self) -> int:
        return 4 if self is Form.LOW4 else 8


NEAR = 7  # largest distance at which a change is near


def form_of(num_changes: int, value_bytes: int) -> Form:
    """Return what is to be sent of values that changed ``num_changes`` times by `NEAR` at most."""
    if value_bytes != 2:
        return Form.VALUES
    if num_changes <= 1:
        return Form.LOW4
    return Form.LOW8 if num_changes * NEAR < 128 else Form.VALUES


def _ordered(values: Tensor) -> Tensor:
    bits = values.view(torch.int16).to(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFF, bits)


def to_low_bits(values: Tensor, form: Form) -> Tensor:
    """Return the lowest bits of 16-bit ``values``, uint8: in `Form.LOW4` two in a byte."""
    ordered = _ordered(values)
    if form is Form.LOW8:
        return (ordered & 0xFF).to(torch.uint8)
    padded = torch.nn.functional.pad(ordered & 0xF, (0, ordered.numel() % 2))
    return (padded[0::2] | padded[1::2] << 4).to(torch.uint8)


def from_low_bits(old: Tensor, codes: Tensor, form: Form) -> Tensor:
    """Return the values next to ``old``, 16-bit, that have the lowest bits ``codes``."""
    low = codes.to(torch.int32)
    if form is Form.LOW4:
        low = torch.stack([low & 0xF, low >> 4], 1).view(-1)[: old.numel()]
    ordered, half = _ordered(old), 1 << (form.num_bits - 1)
    new = ordered + ((low - ordered + half) & (2 * half - 1)) - half
    bits = torch.where(new < 0, new ^ 0x7FFF, new)
    return bits.to(torch.int16).view(old.dtype)


def compare(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Return masks of where two 1-D tensors of a 16-bit dtype differ in a bit, and of where by far.

    The latter has all positions whose values are further apart than `NEAR`, and those that changed
    their sign. Its cost does not depend on how many there are.
    """
    # Of magnitudes, if signs are equal. Integers, as torch's comparisons take 5 times as long.
    one, two = old.view(torch.int16), new.view(torch.int16)
    distance = two - one
    changed = distance.neg().bitwise_or_(distance)
    above = distance.add_(NEAR)
    far = above.neg().add_(2 * NEAR).bitwise_or_(above).bitwise_or_(two ^ one)
    return _is_negative(changed), _is_negative(far)


def _is_negative(values: Tensor) -> Tensor:
    """Return a mask of the negative ones of int16 ``values``, which are overwritten."""
    return values.bitwise_right_shift_(15).to(torch.int8).bitwise_and_(1).view(torch.bool)


def encode_gaps(positions: Tensor) -> Tensor:
    """Return ``positions`` (int64, in order, on the CPU) as gaps."""
    gaps = torch.diff(positions, prepend=torch.tensor([-1])) - 1
    wide = gaps // _MORE
    if not bool(wide.any()):
        return gaps.to(torch.uint8)
    ends = (wide + 1).cumsum(0) - 1
    encoded = torch.full((int(ends[-1]) + 1,), _MORE, dtype=torch.uint8)
    encoded[ends] = (gaps % _MORE).to(torch.uint8)
    return encoded


def decode_gaps(encoded: Tensor) -> Tensor:
    """Return the positions that gaps stand for: int64."""
    is_end = encoded != _MORE
    passed = encoded.cumsum(0, dtype=torch.int64)[is_end]
    return passed + torch.arange(passed.numel())


def num_bits_bytes(numel: int) -> int:
    """Return the bytes of bits for ``numel`` positions."""
    return -(-numel // _LITTLE)


def pack_bits(mask: Tensor) -> Tensor:
    """Return a 1-D bool ``mask`` as bits."""
    if mask.numel() % _LITTLE or mask.storage_offset() % _LITTLE:  # of no int64
        mask = torch.nn.functional.pad(mask, (0, -mask.numel() % _LITTLE))  # a copy
    words = mask.view(torch.int64) * _GATHER_BITS
    return (words >> 56).to(torch.uint8)


def unpack_bits(packed: Tensor, numel: int) -> Tensor:
    """Return the first ``numel`` of bits as a bool mask."""
    bits = torch.arange(_LITTLE, dtype=torch.uint8)
    return ((packed[:, None] >> bits) & 1).view(-1)[:numel].bool()


def encode(mask: Tensor, value_bytes: int | None = None) -> tuple[Kind, Tensor]:
    """Return the shortest encoding of the positions that ``mask`` has.

    If ``value_bytes`` is given, others may be added: so many bytes go with each position, and all
    of them may be shorter than bits and those that are meant.
    """
    positions = mask.nonzero().view(-1)
    numel, count = mask.numel(), positions.numel()
    num_bits = num_bits_bytes(numel)
    size = value_bytes or 0
    if count == numel or (size and (numel - count) * size <= min(num_bits, count)):
        return Kind.ALL, torch.empty(0, dtype=torch.uint8)
    if count < num_bits:
        gaps = encode_gaps(positions)
        if gaps.numel() <= num_bits:
            return Kind.GAPS, gaps
    return Kind.BITS, pack_bits(mask)


def decode(kind: Kind, encoded: Tensor, numel: int) -> Tensor | slice:
    """Return what `encode` encoded as an index: positions, or a slice for all."""
    if kind is Kind.ALL:
        if not encoded.numel():
            return slice(0, numel)
    else:
        if kind is Kind.BITS:
            is_whole = encoded.numel() == num_bits_bytes(numel)
            positions = unpack_bits(encoded, encoded.numel() * _LITTLE).nonzero().view(-1)
        else:
            is_whole = not encoded.numel() or int(encoded[-1]) != _MORE
            positions = decode_gaps(encoded)
        if is_whole and (not positions.numel() or int(positions[-1]) < numel):
            return positions
    raise ValueError(f"{encoded.numel()} bytes of {kind} encode no positions below {numel}")
