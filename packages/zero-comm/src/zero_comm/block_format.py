"""Where each byte of a quantized buffer lies: pure arithmetic, no tensors.

[Note: the quantized buffer]
A flat tensor of ``numel`` elements is cut into **blocks** of ``block_size`` consecutive elements;
the last block is padded with zeros. Each block has one **maximum**: the largest magnitude in it,
at least 2**-100, rounded to bfloat16; NaN if the block holds NaN or Inf. The **step** of a block
is its maximum divided by the top **level** (127 for 8 bits, 7 for 4), and a **code** is an element
times the reciprocal of the step, rounded to the nearest integer, ties to even: symmetric
quantization, so zero stays zero. A code times the step is the element again. All of it is
computed in fp32. The buffer is flat uint8, in three parts::

    codes     num_blocks * block_size * bits / 8    block after block
    maxima    num_blocks * 2                        bfloat16, native byte order
    padding   to a multiple of 16                   zeros

8 bits: the code of element ``i`` of a block is its byte ``i``, as int8. 4 bits: byte ``j`` of a
block is the int8 ``lo + 16 * hi``, where ``lo`` is the code of element ``j`` and ``hi`` that of
element ``j + block_size / 2``. Pairing the halves keeps both operands contiguous. To read it:
``lo`` is the low nibble, sign-extended, and ``hi`` is ``(byte + 8) >> 4``.

The maximum is stored, not the step, because for 16-bit input it is representable in 16 bits and
comes back exactly; with a rounded step, a second quantization could move the grid. The total is
a multiple of 16 bytes so that each rank's part of a gathered buffer is aligned for wide loads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

__all__ = ["DEFAULT_BLOCK_SIZE", "BlockFormat", "quantized_nbytes"]

MAX_NBYTES: Final = 2  # a block's maximum, in bfloat16
ALIGNMENT: Final = 16  # bytes

# Per 16-bit element, maxima included: 8 bits send 1/1.98 of the bytes, 4 bits 1/3.88. A block of
# 4-bit codes is smaller because an outlier costs its neighbours more: 7 levels instead of 127.
DEFAULT_BLOCK_SIZE: Final[Mapping[int, int]] = MappingProxyType({8: 256, 4: 128})


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How many bits a code has and how many elements share a step.

    Args:
        bits: 8 or 4.
        block_size: elements per block, a positive multiple of 8.
    """

    bits: int
    block_size: int

    def __post_init__(self) -> None:
        if self.bits not in DEFAULT_BLOCK_SIZE:
            raise ValueError(f"bits must be 8 or 4, got {self.bits!r}")
        if self.block_size <= 0 or self.block_size % 8 != 0:
            raise ValueError(
                f"block_size must be a positive multiple of 8, got {self.block_size!r}"
            )

    @classmethod
    def make(cls, bits: int, block_size: int | None) -> BlockFormat:
        """Fill in the default block size of ``bits`` where ``block_size`` is None."""
        if block_size is None:
            block_size = DEFAULT_BLOCK_SIZE.get(bits, 8)
        return cls(bits, block_size)

    @property
    def top_level(self) -> int:
        """The largest code; the smallest is its negative."""
        return int(2 ** (self.bits - 1)) - 1

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block's codes."""
        return self.block_size * self.bits // 8

    def num_blocks(self, numel: int) -> int:
        """Blocks that ``numel`` elements fill, the padded one included."""
        if numel < 0:
            raise ValueError(f"numel must not be negative, got {numel}")
        return -(-numel // self.block_size)

    def codes_nbytes(self, numel: int) -> int:
        """Bytes of all codes: the offset of the maxima."""
        return self.num_blocks(numel) * self.block_nbytes

    def used_nbytes(self, numel: int) -> int:
        """Bytes of codes and maxima: the offset of the padding."""
        return self.num_blocks(numel) * (self.block_nbytes + MAX_NBYTES)

    def nbytes(self, numel: int) -> int:
        """Bytes of the whole buffer."""
        return -(-self.used_nbytes(numel) // ALIGNMENT) * ALIGNMENT


def quantized_nbytes(numel: int, *, bits: int = 8, block_size: int | None = None) -> int:
    """Length in bytes of the buffer that `zero_comm.quantize` makes of ``numel`` elements.

    In closed form, with ``n = ceil(numel / block_size)``: ``n * (block_size * bits / 8 + 2)``,
    rounded up to a multiple of 16. See [Note: the quantized buffer].

    Args:
        numel: elements of the flat tensor.
        bits: 8 or 4.
        block_size: elements per block, a multiple of 8; None for ``DEFAULT_BLOCK_SIZE[bits]``.

    Raises:
        ValueError: an argument out of range, by name.
    """
    return BlockFormat.make(bits, block_size).nbytes(numel)
