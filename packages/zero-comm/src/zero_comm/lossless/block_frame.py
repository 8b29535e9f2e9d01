"""Frame of a lossless buffer: blocks, their descriptors and sizes. Pure arithmetic, no tensors.

[Note: the block frame]
A flat tensor of ``numel`` elements of 16 or 32 bits is coded in **blocks** of 256 consecutive
elements; absent ones of the last block count as zero bits. A buffer is flat uint8, in native byte
order::

    descriptors    num_blocks * 2    mode * 2**11 + bytes of the block
    codes          block after block, without gaps

| mode | bytes of a block |
|---|---|
| 0 empty | none: the coding's most frequent block |
| 1 raw | the elements that are there |
| 2 and more | as the coding says |

An encoder takes mode 0 where it can, else the mode of the fewest bytes, of several the lowest. So
there is one encoding. The two codings are [Note: the difference buffer] in `difference_format` and
[Note: the value buffer] in `value_format`.
"""

from __future__ import annotations

from typing import Final, Literal

Coding = Literal["differences", "values"]

BLOCK_NUMEL: Final = 256
MODE_SHIFT: Final = 11
EMPTY: Final = 0
RAW: Final = 1
ITEMSIZES: Final = (2, 4)


def num_blocks(numel: int) -> int:
    """Return the number of blocks of ``numel`` elements, the last one's absent ones included."""
    return -(-numel // BLOCK_NUMEL)


def descriptors_nbytes(numel: int) -> int:
    """Return the bytes of all descriptors, which is the offset of the codes."""
    return num_blocks(numel) * 2


def max_buffer_nbytes(numel: int, itemsize: int) -> int:
    """Return the most bytes that a buffer of ``numel`` elements may have: all blocks are raw."""
    return descriptors_nbytes(numel) + numel * itemsize
