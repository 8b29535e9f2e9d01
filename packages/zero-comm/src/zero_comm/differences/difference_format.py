"""Format of lossless differences: meaning and offset of each byte. Pure arithmetic, no tensors.

[Note: the difference buffer]
Two flat tensors of ``numel`` elements of 16 or 32 bits, the old and the new one, are compared as
**ordered integers**: the bits of an element, all of them inverted if its sign bit is set, else that
bit alone. Any two bit patterns have a difference, which is taken modulo 2**bits: those of NaN,
negative zero and denormals too. Neighbouring numbers differ by one. The difference ``d`` is read as
a signed integer and becomes ``z = 2 d`` or, if it is negative, ``-2 d - 1``.

**Blocks** have 256 consecutive elements; absent ones of the last block are unchanged. A buffer is
flat uint8, in native byte order::

    descriptors    num_blocks * 2    mode * 2**11 + bytes of the block
    codes          block after block, without gaps

| mode | bytes of a block |
|---|---|
| 0 same | none: ``z`` is zero everywhere |
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

An encoder takes the mode of the fewest bytes, of several the lowest. So there is one encoding.

Differences of one step of Adam are nearly geometric in their binary logarithm: of the weights near
zero, half as many are in each binade, and their neighbours are half as far away. So codes that
double their width cost 0.1 to 0.5 bits more than the entropy (the project's docs/benchmarks.md,
"Lossless differences of weights").
"""

from __future__ import annotations

from typing import Final

BLOCK_NUMEL: Final = 256
DESCRIPTOR_NBYTES: Final = 2
MODE_SHIFT: Final = 11
BITMAP_NBYTES: Final = BLOCK_NUMEL // 8
SAME: Final = 0
RAW: Final = 1
LIST: Final = 2
BITMAP: Final = 6
DENSE: Final = 10
ITEMSIZES: Final = (2, 4)


def num_blocks(numel: int) -> int:
    """Return the number of blocks of ``numel`` elements, the last one's absent ones included."""
    return -(-numel // BLOCK_NUMEL)


def descriptors_nbytes(numel: int) -> int:
    """Return the bytes of all descriptors, which is the offset of the codes."""
    return num_blocks(numel) * DESCRIPTOR_NBYTES


def max_difference_nbytes(numel: int, itemsize: int) -> int:
    """Return the most bytes that a buffer of ``numel`` elements may have: all blocks are raw."""
    return descriptors_nbytes(numel) + numel * itemsize


def num_starts(itemsize: int) -> int:
    """Return how many widths the first level may have."""
    return 3 if itemsize == 2 else 4
