"""How long a quantized message is: zero-comm's formats as a closed form, for plans.

A plan says what quantized collectives would send and keep whether or not zero-comm is installed;
the integration tests hold these numbers against that package.

A message is a header and a buffer: codes of blocks of equal length (the last one filled up), a
16-bit scale for each, and zeros up to a multiple of 16 bytes.
"""

from __future__ import annotations

__all__ = ["DIFFERENCE", "message_nbytes", "quantized_nbytes"]

DIFFERENCE = "int4_difference"
"""The format of changes of weights: int4 in longer blocks."""
HEADER_NBYTES = 32
_SCALE_NBYTES = 2
_ALIGNMENT = 16
_BITS_AND_BLOCK = {"int8": (8, 256), "int4": (4, 128), "e4m3": (8, 128), "e5m2": (8, 128)}
DIFFERENCE_BLOCK_SIZE = 256
"""Elements per block of weight differences."""


def quantized_nbytes(numel: int, kind: str, block_size: int | None = None) -> int:
    """Bytes of ``numel`` quantized elements.

    Args:
        numel: elements, at least 0.
        kind: "int8", "int4", "e4m3" or "e5m2".
        block_size: elements per block; None for the kind's own.
    """
    bits, usual = _BITS_AND_BLOCK[kind]
    block = usual if block_size is None else block_size
    num_blocks = -(-numel // block)
    used = num_blocks * (block * bits // 8 + _SCALE_NBYTES)
    return -(-used // _ALIGNMENT) * _ALIGNMENT


def message_nbytes(numel: int, kind: str) -> int:
    """Bytes of a message of ``numel`` elements.

    Args:
        numel: elements, at least 0.
        kind: as in `quantized_nbytes`, or `DIFFERENCE`.
    """
    if kind == DIFFERENCE:
        return HEADER_NBYTES + quantized_nbytes(numel, "int4", DIFFERENCE_BLOCK_SIZE)
    return HEADER_NBYTES + quantized_nbytes(numel, kind)
