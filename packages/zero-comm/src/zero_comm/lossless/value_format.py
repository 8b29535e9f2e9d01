"""Format of losslessly coded values: meaning of each byte of a block.

[Note: the value buffer]
Blocks are those of [Note: the block frame] in `zero_comm.lossless.block_frame`. The bits of an
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

from typing import Final

from zero_comm.lossless.block_frame import BLOCK_NUMEL

CODED: Final = 2
MAX_WIDTH: Final = 6
PLANE_NBYTES: Final = BLOCK_NUMEL // 8


def fixed_nbytes(width: int, itemsize: int) -> int:
    """Return the bytes of a coded block without its escapes."""
    return 1 + (itemsize - 1) * BLOCK_NUMEL + width * PLANE_NBYTES
