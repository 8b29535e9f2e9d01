"""Format of losslessly coded values: meaning and offset of each byte. Pure arithmetic, no tensors.

[Note: the value buffer]
A flat tensor of ``numel`` elements of 16 or 32 bits is coded in **blocks** of 256 consecutive
elements. The bits of an element are rotated left by one, so that the sign comes last. The highest
byte of the result is the element's **top byte**: the exponent of bfloat16 and of float32, the
exponent and three bits more of float16. Gradients of neighbouring weights have exponents close to
each other, while the bytes below the top are as good as random. So top bytes alone are coded. A
buffer is flat uint8, in native byte order::

    descriptors    num_blocks * 2    mode * 2**11 + bytes of the block
    codes          block after block, without gaps

| mode | bytes of a block |
|---|---|
| 0 zero | none: all bits are zero |
| 1 raw | the elements that are there |
| 2 + w coded | the base; lower bytes; w planes; escapes |

The **base** is the largest top byte, one byte. The **lower bytes** are those of all 256 elements,
first the lowest of each, then the next. An element's **code** is the base less its top byte, or
``2**w - 1`` if it is no less than that. **Plane** k has bit k of all codes in 32 bytes, the lowest
bit of a byte first. **Escapes** are the top bytes of the elements with the largest code, in order.
``w`` is 0 to 6. With ``w = 0`` all top bytes are the base, and there are no escapes.

An encoder takes the ``w`` of the fewest bytes, of several the lowest, and raw elements where none
is shorter or where elements of the block are absent (the last block's). So there is one encoding.

Of a normal distribution ``w = 3`` leaves 11.3 of 16 bits. The entropy of a bfloat16 is 10.6 there:
8 of sign and mantissa and 2.6 of the exponent. DFloat11 (arXiv 2504.11651) codes the exponents of
weights by Huffman's method.
"""

from __future__ import annotations

from typing import Final

from zero_comm.differences.difference_format import BLOCK_NUMEL, descriptors_nbytes, num_blocks

ZERO: Final = 0
RAW: Final = 1
CODED: Final = 2
MAX_WIDTH: Final = 6
PLANE_NBYTES: Final = BLOCK_NUMEL // 8


def max_values_nbytes(numel: int, itemsize: int) -> int:
    """Return the most bytes that a buffer of ``numel`` elements may have: all blocks are raw."""
    return descriptors_nbytes(numel) + numel * itemsize


def fixed_nbytes(width: int, itemsize: int) -> int:
    """Return the bytes of a coded block without its escapes."""
    return 1 + (itemsize - 1) * BLOCK_NUMEL + width * PLANE_NBYTES


def expected_values_nbytes(numel: int, itemsize: int) -> int:
    """Return the bytes of bfloat16 or float32 values of a normal distribution.

    Of 256 of them the largest is between 2 and 4 standard deviations, so a code of 7 or more stands
    for less than 1/32 of one: 1 element in 40.
    """
    coded = fixed_nbytes(3, itemsize) + BLOCK_NUMEL // 40
    return descriptors_nbytes(numel) + num_blocks(numel) * coded
