"""Format of lossless differences: meaning of each byte of a block.

[Note: the difference buffer]
Two tensors, the old and the new one, are compared as **ordered integers**: the bits of an element,
all of them inverted if its sign bit is set, else that bit alone. Any two bit patterns have a
difference, which is taken modulo 2**bits: those of NaN, negative zero and denormals too.
Neighbouring numbers differ by one. The difference ``d`` is read as a signed integer and becomes
``z = 2 d`` or, if it is negative, ``-2 d - 1``. Blocks are those of [Note: the block frame] in
`zero_comm.lossless.block_frame`; absent elements are unchanged.

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
"""

from __future__ import annotations

from typing import Final

BITMAP_NBYTES: Final = 32
LIST: Final = 2
BITMAP: Final = 6
DENSE: Final = 10


def num_starts(itemsize: int) -> int:
    """Return how many widths the first level may have."""
    return 3 if itemsize == 2 else 4
