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
there is one encoding.

[Note: the difference buffer]
Two tensors, the old and the new one, are compared as **ordered integers**: the bits of an element,
all of them inverted if its sign bit is set, else that bit alone. Any two bit patterns have a
difference, which is taken modulo 2**bits: those of NaN, negative zero and denormals too.
Neighbouring numbers differ by one. The difference ``d`` is read as a signed integer and becomes
``z = 2 d`` or, if it is negative, ``-2 d - 1``. Absent elements are unchanged.

| mode | bytes of a block |
|---|---|
| 0 empty | none: ``z`` is zero everywhere |
| 1 raw | the new elements that are there |
| 2 + s list | n, 1 to 255; n positions, ascending, a byte each; levels of ``z - 1`` there |
| 6 + s bitmap | 32 bytes, a bit per element, the lowest first; levels of ``z - 1`` of those set |
| 10 + s dense | levels of ``z`` of all 256 |

**Levels** hold n integers. The first level has a code of ``w = 2 * 2**s`` bits for each of them:
the integer, or the largest code if it is no less than that. What those are larger by is held by
the next level, of twice the width, and so on until a level has no largest code, or as many bits as
an element. Codes of 2 and 4 bits: byte ``j`` of the ``q = ceil(n w / 8)`` bytes has those of
integers ``j``, ``j + q``, ..., the first in the lowest bits; absent ones are zero. ``w`` is less
than the bits of an element, so ``s`` is 0 to 2 for 16 bits and 0 to 3 for 32.

Differences of one step of Adam are nearly geometric in their binary logarithm: of the weights near
zero, half as many are in each binade, and their neighbours are half as far away. So codes that
double their width cost 0.1 to 0.5 bits more than the entropy (the project's docs/benchmarks.md,
"Lossless differences of weights").

[Note: the value buffer]
The bits of an
element are rotated left by one, so that the sign comes last. The highest byte of the result is the
element's **top byte**: the exponent of bfloat16 and of float32, the exponent and three bits more of
float16. Gradients of neighbouring weights have exponents close to each other, while the bytes below
the top are as good as random. So top bytes alone are coded.

| mode | bytes of a block |
|---|---|
| 0 empty | none: all bits are zero |
| 1 raw | the elements that are there |
| 2 + w coded | the base; lower bytes; w planes; escapes |

The **base** is the largest top byte, one byte. The **lower bytes** are those of all 256 elements,
first the lowest of each, then the next. An element's **code** is the base less its top byte, or
``2**w - 1`` if it is no less than that. **Plane** k has bit k of all codes in 32 bytes, the lowest
bit of a byte first. **Escapes** are the top bytes of the elements with the largest code, in order.
``w`` is 0 to 6. With ``w = 0`` all top bytes are the base, and there are no escapes. A block with
absent elements is never coded.

Of a normal distribution ``w = 3`` leaves 11.3 of 16 bits. The entropy of a bfloat16 is 10.6 there:
8 of sign and mantissa and 2.6 of the exponent. DFloat11 (arXiv 2504.11651) codes the exponents of
weights by Huffman's method.
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
# Modes of differences.
LIST: Final = 2
BITMAP: Final = 6
DENSE: Final = 10
# Modes of values.
CODED: Final = 2
MAX_WIDTH: Final = 6


def num_blocks(numel: int) -> int:
    """Return the number of blocks of ``numel`` elements, the last one's absent ones included."""
    return -(-numel // BLOCK_NUMEL)


def descriptors_nbytes(numel: int) -> int:
    """Return the bytes of all descriptors, which is the offset of the codes."""
    return num_blocks(numel) * 2


def max_buffer_nbytes(numel: int, itemsize: int) -> int:
    """Return the most bytes that a buffer of ``numel`` elements may have: all blocks are raw."""
    return descriptors_nbytes(numel) + numel * itemsize


def num_starts(itemsize: int) -> int:
    """Return how many widths the first level may have."""
    return 3 if itemsize == 2 else 4


def fixed_nbytes(width: int, itemsize: int) -> int:
    """Return the bytes of a coded block without its escapes."""
    return 1 + (itemsize - 1) * BLOCK_NUMEL + width * BITMAP_NBYTES
