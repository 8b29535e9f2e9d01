"""Triton kernels for [Note: the value buffer] in `block_frame`. A program codes one tile.

`triton_frame` has the functions that the kernels share with `triton_differences`. Blocks of one
tile may have different widths, so the whole tile loops over all planes with a mask.
"""

# No `from __future__ import annotations`: Triton reads the annotations of the kernels.
import triton
import triton.language as tl

from zero_comm.lossless import triton_frame as frame
from zero_comm.lossless.triton_frame import BITMAP_NBYTES, BLOCK, CODED, EMPTY, MAX_WIDTH, RAW


@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=["descriptors_ptr"])
def choose_kernel(
    values_ptr: tl.tensor,
    descriptors_ptr: tl.tensor,
    numel: tl.tensor,
    BITS: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Store the int16 descriptors of a tile's blocks."""
    block, present = frame.blocks_of_tile(numel, BLOCKS)
    bits = frame.load_tile(values_ptr, numel, BITS, BLOCKS)
    top = _rotated(bits, BITS) >> (BITS - 8)
    code = tl.max(top, 1)[:, None] - top
    is_whole = present == BLOCK
    # The mode is in the lowest 4 bits, so the minimum prefers the lowest mode of equal size.
    best = present * (BITS // 8) * 16 + RAW
    of_one = is_whole & (tl.max(code, 1) == 0)
    best = tl.where(of_one, tl.minimum(best, _fixed_nbytes(0, BITS) * 16 + CODED), best)
    for WIDTH in tl.static_range(1, MAX_WIDTH + 1):
        escaped = tl.sum((code >= (1 << WIDTH) - 1).to(tl.int32), 1)
        found = (_fixed_nbytes(WIDTH, BITS) + escaped) * 16 + (CODED + WIDTH)
        best = tl.where(is_whole, tl.minimum(best, found), best)
    frame.store_descriptors(descriptors_ptr, block, present, best, tl.max(bits, 1) == 0)


@triton.jit(
    do_not_specialize=["numel"], do_not_specialize_on_alignment=["descriptors_ptr", "codes_ptr"]
)
def encode_kernel(
    values_ptr: tl.tensor,
    descriptors_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    numel: tl.tensor,
    BITS: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Write the codes of a tile. ``ends``, int64, is the end of each block in ``codes``."""
    present, mode, nbytes, end = frame.places_of_tile(descriptors_ptr, ends_ptr, numel, BLOCKS)
    lane = tl.arange(0, BLOCK)[None, :]
    bits = frame.load_tile(values_ptr, numel, BITS, BLOCKS)
    row_ptr = codes_ptr + (end - nbytes)[:, None]
    is_raw = (mode == RAW)[:, None] & (lane < present[:, None])
    frame.store_wide(row_ptr + lane * (BITS // 8), bits, is_raw, BITS)

    is_coded = mode >= CODED
    width = (mode - CODED)[:, None]
    rotated = _rotated(bits, BITS)
    top = rotated >> (BITS - 8)
    base = tl.max(top, 1)
    tl.store(codes_ptr + (end - nbytes), base.to(tl.uint8), mask=is_coded)
    for BYTE in tl.static_range(BITS // 8 - 1):
        low = (rotated >> (8 * BYTE)).to(tl.uint8)
        tl.store(row_ptr + 1 + BYTE * BLOCK + lane, low, mask=is_coded[:, None])
    largest = _largest(width)
    code = tl.minimum(base[:, None] - top, largest.to(tl.uint32))
    for PLANE in tl.static_range(MAX_WIDTH):
        eights = tl.reshape((code >> PLANE) & 1, [BLOCKS, BITMAP_NBYTES, 8])
        packed = tl.sum(eights << tl.arange(0, 8).to(tl.uint32)[None, None, :], 2)
        byte = _fixed_nbytes(PLANE, BITS) + tl.arange(0, BITMAP_NBYTES)[None, :]
        tl.store(row_ptr + byte, packed.to(tl.uint8), mask=width > PLANE)
    is_escape = (width > 0) & (code == largest.to(tl.uint32))
    rank = tl.cumsum(is_escape.to(tl.int32), 1) - 1
    tl.store(row_ptr + _fixed_nbytes(width, BITS) + rank, top.to(tl.uint8), mask=is_escape)


@triton.jit(
    do_not_specialize=["numel", "codes_nbytes"],
    do_not_specialize_on_alignment=["descriptors_ptr", "codes_ptr"],
)
def decode_kernel(
    descriptors_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    values_ptr: tl.tensor,
    is_bad_ptr: tl.tensor,
    numel: tl.tensor,
    codes_nbytes: tl.tensor,
    BITS: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Fill the elements of a tile. Invalid blocks are treated as in `triton_differences`."""
    present, mode, nbytes, end = frame.places_of_tile(descriptors_ptr, ends_ptr, numel, BLOCKS)
    lane = tl.arange(0, BLOCK)[None, :]
    row_ptr = codes_ptr + (end - nbytes)[:, None]
    width = (mode - CODED)[:, None]
    is_raw = (mode == RAW) & (nbytes == present * (BITS // 8))
    num_escapes = nbytes - _fixed_nbytes(mode - CODED, BITS)
    is_coded = (mode >= CODED) & (mode <= CODED + MAX_WIDTH) & (present == BLOCK)
    is_coded = is_coded & (num_escapes >= 0)
    is_good = is_raw | is_coded | ((mode == EMPTY) & (nbytes == 0))
    is_good = is_good & (frame.total_of(ends_ptr, numel, present) <= codes_nbytes)
    is_coded = is_coded & is_good
    is_raw = is_raw & is_good

    code = tl.zeros([BLOCKS, BLOCK], tl.uint32)
    for PLANE in tl.static_range(MAX_WIDTH):
        is_here = is_coded[:, None] & (width > PLANE)
        byte = tl.load(row_ptr + _fixed_nbytes(PLANE, BITS) + lane // 8, mask=is_here, other=0)
        code = code | (((byte.to(tl.uint32) >> (lane & 7).to(tl.uint32)) & 1) << PLANE)
    is_escape = is_coded[:, None] & (width > 0) & (code == _largest(width).to(tl.uint32))
    is_good = is_good & ((is_coded == 0) | (tl.sum(is_escape.to(tl.int32), 1) == num_escapes))
    is_coded = is_coded & is_good
    is_escape = is_escape & is_coded[:, None]
    rank = tl.cumsum(is_escape.to(tl.int32), 1) - 1
    escape = tl.load(row_ptr + _fixed_nbytes(width, BITS) + rank, mask=is_escape, other=0)
    base = tl.load(codes_ptr + (end - nbytes), mask=is_coded, other=0).to(tl.uint32)
    top = tl.where(is_escape, escape.to(tl.uint32), (base[:, None] - code) & 0xFF)
    rotated = top << (BITS - 8)
    for BYTE in tl.static_range(BITS // 8 - 1):
        low = tl.load(row_ptr + 1 + BYTE * BLOCK + lane, mask=is_coded[:, None], other=0)
        rotated = rotated | (low.to(tl.uint32) << (8 * BYTE))
    bits = (rotated >> 1) | ((rotated & 1) << (BITS - 1))
    is_element = is_raw[:, None] & (lane < present[:, None])
    raw = frame.load_wide(row_ptr + lane * (BITS // 8), is_element, BITS)
    bits = tl.where(is_raw[:, None], raw, tl.where((mode == EMPTY)[:, None], 0, bits))
    is_filled = is_good[:, None] & (lane < present[:, None])
    first_ptr = values_ptr + tl.program_id(0).to(tl.int64) * (BLOCKS * BLOCK)
    element_ptr = first_ptr + (tl.arange(0, BLOCKS)[:, None] * BLOCK + lane)
    tl.store(element_ptr, bits.to(values_ptr.dtype.element_ty), mask=is_filled)
    frame.report_bad(is_bad_ptr, present, is_good)


@triton.jit
def _rotated(bits: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Return the bits rotated left by one, with the sign in the lowest bit."""
    return ((bits << 1) | (bits >> (BITS - 1))) & ((1 << BITS) - 1)


@triton.jit
def _fixed_nbytes(width: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    return width * BITMAP_NBYTES + (1 + (BITS // 8 - 1) * BLOCK)


@triton.jit
def _largest(width: tl.tensor) -> tl.tensor:
    return (1 << tl.minimum(tl.maximum(width, 0), MAX_WIDTH)) - 1
