"""Byte layout of losslessly coded tensors. This module has arithmetic on sizes, and no tensors.

[Note: the block frame]
A flat tensor of ``numel`` elements of 16 or 32 bits is coded in **blocks** of 256 consecutive
elements. Absent elements of the last block count as zero bits. A buffer is flat uint8 in native
byte order::

    descriptors    num_blocks * 2    mode * 2**11 + number of bytes of the block
    codes          the bytes of every block, without gaps

| mode | bytes of a block |
|---|---|
| 0 empty | none: the block has the coding's most frequent contents |
| 1 raw | the elements that exist |
| 2 and more | depends on the coding |

An encoder uses mode 0 wherever the block allows it. Otherwise it uses the mode with the fewest
bytes, and the lowest such mode. Every tensor therefore has exactly one encoding.

[Note: the difference buffer]
An old and a new tensor are compared as **ordered integers**, in which neighbouring numbers differ
by one. The ordered integer of an element inverts all bits if the sign bit is set, and only the sign
bit otherwise. The difference of two ordered integers is taken modulo 2**bits, so NaN, negative zero
and denormals need no special case. The difference ``d``, a signed integer, is stored as ``z = 2
d``, or ``-2 d - 1`` if ``d`` is negative. Absent elements have ``z = 0``.

| mode | bytes of a block |
|---|---|
| 0 empty | none: ``z`` is zero everywhere |
| 1 raw | the new elements that exist |
| 2 + s list | count n, 1 to 255; n ascending positions, one byte each; levels of their ``z - 1`` |
| 6 + s bitmap | 32 bytes, one bit per element, lowest first; levels of ``z - 1`` of the set bits |
| 10 + s dense | levels of ``z`` of all 256 elements |

**Levels** store n integers. The first level stores a code of ``w = 2 * 2**s`` bits for each
integer. The code is the integer, or the largest code if the integer is not smaller. The next level
has twice the width and stores the excess over the largest code, for the integers with the largest
code only. Levels end when no code is the largest one, or at the width of an element. In a level of
2-bit or 4-bit codes, byte ``j`` of the ``q = ceil(n w / 8)`` bytes holds the codes of integers
``j``, ``j + q``, ..., the first in the lowest bits. Absent codes are zero. ``w`` is smaller than
the width of an element, so ``s`` is 0 to 2 for 16 bits and 0 to 3 for 32 bits.

Codes whose width doubles suit a step of Adam, whose differences are nearly geometric in their
binary logarithm. They cost 0.1 to 0.5 bits more than the entropy ("Lossless differences of
weights" in integration/lab/evidence/benchmarks.md).

[Note: the value buffer]
The bits of an element are rotated left by one, which moves the sign to the lowest bit. The highest
byte of the result is the element's **top byte**: the exponent of bfloat16 and float32, or the
exponent and three mantissa bits of float16. Neighbouring gradients have similar exponents, and
their lower bytes are nearly random. Only top bytes are therefore compressed.

| mode | bytes of a block |
|---|---|
| 0 empty | none: all bits are zero |
| 1 raw | the elements that exist |
| 2 + w coded | the base; the lower bytes; w planes; the escapes |

The **base** is the largest top byte of the block, one byte. The **lower bytes** are stored for all
256 elements, first the lowest byte of each element, then the next. An element's **code** is the
base minus its top byte, limited to ``2**w - 1``. **Plane** k holds bit k of all codes in 32 bytes,
lowest bit first. **Escapes** are the top bytes of the elements with the largest code, in order.
``w`` is 0 to 6. With ``w = 0`` all top bytes equal the base, and there are no escapes. A block with
absent elements is never coded.

For normally distributed values ``w = 3`` takes 11.3 of 16 bits; the entropy of bfloat16 is 10.6.
DFloat11 (arXiv 2504.11651) compresses the exponents of weights by Huffman coding.
"""

from __future__ import annotations

from typing import Final, Literal

Coding = Literal["differences", "values"]

BLOCK_NUMEL: Final = 256
MODE_SHIFT: Final = 11
NBYTES_MASK: Final = (1 << MODE_SHIFT) - 1
EMPTY: Final = 0
RAW: Final = 1
ITEMSIZES: Final = (2, 4)
BITMAP_NBYTES: Final = BLOCK_NUMEL // 8
# Modes of the difference buffer, before ``s`` is added.
LIST: Final = 2
BITMAP: Final = 6
DENSE: Final = 10
# Mode of the value buffer, before ``w`` is added, and the largest ``w``.
CODED: Final = 2
MAX_WIDTH: Final = 6


def num_blocks(numel: int) -> int:
    return -(-numel // BLOCK_NUMEL)


def descriptors_nbytes(numel: int) -> int:
    """Return the bytes of all descriptors, which is also the offset of the codes."""
    return num_blocks(numel) * 2


def max_buffer_nbytes(numel: int, itemsize: int) -> int:
    """Return the largest possible size in bytes of a buffer, in which all blocks are raw."""
    return descriptors_nbytes(numel) + numel * itemsize


def num_starts(itemsize: int) -> int:
    """Return the number of widths that the first level of a difference may have."""
    return 3 if itemsize == 2 else 4


def fixed_nbytes(width: int, itemsize: int) -> int:
    """Return the bytes of a coded block of values without its escapes."""
    return 1 + (itemsize - 1) * BLOCK_NUMEL + width * BITMAP_NBYTES
