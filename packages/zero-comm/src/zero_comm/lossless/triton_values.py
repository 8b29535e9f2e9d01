"""Triton kernels for [Note: the value buffer] in `block_frame`. A program codes one block.

`triton_frame` has the functions that the kernels share with `triton_differences`.
"""

# No `from __future__ import annotations`: Triton reads the annotations of the kernels.
import triton
import triton.language as tl

from zero_comm.lossless import triton_frame as frame
from zero_comm.lossless.triton_frame import BITMAP_NBYTES, BLOCK, CODED, EMPTY, MAX_WIDTH, RAW


@triton.jit(**frame.UNSPECIALIZED)
def choose_kernel(
    values_ptr: tl.tensor, descriptors_ptr: tl.tensor, numel: tl.tensor, BITS: tl.constexpr
) -> None:
    """Store the int16 descriptor of a block."""
    present = frame.count_present(numel)
    bits = frame.load_block(values_ptr, present, BITS)
    top = _rotated(bits, BITS) >> (BITS - 8)
    code = tl.max(top) - top
    # The mode is in the lowest 4 bits, so the minimum prefers the lowest mode of equal size.
    best = present * (BITS // 8) * 16 + RAW
    if present == BLOCK:
        if tl.max(code) == 0:
            best = tl.minimum(best, _fixed_nbytes(0, BITS) * 16 + CODED)
        for WIDTH in tl.static_range(1, MAX_WIDTH + 1):
            escaped = tl.sum((code >= (1 << WIDTH) - 1).to(tl.int32))
            nbytes = escaped + _fixed_nbytes(WIDTH, BITS)
            best = tl.minimum(best, nbytes * 16 + (CODED + WIDTH))
    frame.store_descriptor(descriptors_ptr, best, tl.max(bits) == 0)


@triton.jit(**frame.UNSPECIALIZED)
def encode_kernel(
    values_ptr: tl.tensor,
    descriptors_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    numel: tl.tensor,
    BITS: tl.constexpr,
) -> None:
    """Write the codes of a block. ``ends``, int64, is the end of each block in ``codes``."""
    present = frame.count_present(numel)
    mode, nbytes, end = frame.place_of_block(descriptors_ptr, ends_ptr)
    codes_ptr += end - nbytes
    if mode != EMPTY:
        bits = frame.load_block(values_ptr, present, BITS)
        if mode == RAW:
            frame.store_ranked(codes_ptr, bits, frame.elements(frame.EACH) < present, BITS // 8)
        else:
            width = mode - CODED
            rotated = _rotated(bits, BITS)
            top = rotated >> (BITS - 8)
            base = tl.max(top)
            tl.store(codes_ptr, base.to(tl.uint8))
            for BYTE in tl.static_range(BITS // 8 - 1):
                low = (rotated >> (8 * BYTE)).to(tl.uint8)
                tl.store(codes_ptr + 1 + BYTE * BLOCK + frame.elements(frame.EACH), low)
            largest = ((1 << width) - 1).to(tl.uint32)
            code = tl.minimum(base - top, largest)
            for plane in range(width):
                byte = _fixed_nbytes(plane, BITS) + tl.arange(0, frame.LANES)
                tl.store(codes_ptr + byte, frame.bits_by_lane((code >> plane) & 1))
            is_escape = (code == largest) & (width > 0)
            frame.store_ranked(codes_ptr + _fixed_nbytes(width, BITS), top, is_escape, 1)


@triton.jit(**frame.UNSPECIALIZED)
def decode_kernel(
    descriptors_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    values_ptr: tl.tensor,
    is_bad_ptr: tl.tensor,
    numel: tl.tensor,
    codes_nbytes: tl.tensor,
    BITS: tl.constexpr,
) -> None:
    """Fill the elements of a block. A malformed block is left unchanged and sets ``is_bad``."""
    present = frame.count_present(numel)
    mode, nbytes, end = frame.place_of_block(descriptors_ptr, ends_ptr)
    codes_ptr += end - nbytes
    element = frame.elements(frame.EACH)
    width = mode - CODED
    num_escapes = nbytes - _fixed_nbytes(width, BITS)
    is_good = tl.load(ends_ptr + tl.num_programs(0) - 1) <= codes_nbytes
    bits = tl.zeros([frame.EACH, frame.LANES], tl.uint32)
    if mode == RAW:
        is_good = is_good & (nbytes == present * (BITS // 8))
        bits = frame.load_ranked(codes_ptr, is_good & (element < present), present, BITS)
    elif mode == EMPTY:
        is_good = is_good & (nbytes == 0)
    else:
        is_good = is_good & (width <= MAX_WIDTH) & (present == BLOCK) & (num_escapes >= 0)
        if is_good:
            code = bits
            for plane in range(width):
                byte = tl.load(codes_ptr + _fixed_nbytes(plane, BITS) + tl.arange(0, frame.LANES))
                bit = (byte.to(tl.uint32)[None, :] >> tl.arange(0, frame.EACH)[:, None]) & 1
                code = code | (bit << plane)
            is_escape = (code == ((1 << width) - 1).to(tl.uint32)) & (width > 0)
            is_good = tl.sum(is_escape.to(tl.int32)) == num_escapes
            escape_ptr = codes_ptr + _fixed_nbytes(width, BITS)
            escape = frame.load_ranked(escape_ptr, is_escape & is_good, num_escapes, 8)
            base = tl.load(codes_ptr).to(tl.uint32)
            rotated = tl.where(is_escape, escape, (base - code) & 0xFF) << (BITS - 8)
            for BYTE in tl.static_range(BITS // 8 - 1):
                low = tl.load(codes_ptr + 1 + BYTE * BLOCK + element)
                rotated = rotated | (low.to(tl.uint32) << (8 * BYTE))
            bits = (rotated >> 1) | ((rotated & 1) << (BITS - 1))
    if is_good:
        frame.store_block(values_ptr, present, bits)
    else:
        tl.store(is_bad_ptr, 1)


@triton.jit
def _rotated(bits: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Return the bits rotated left by one, with the sign in the lowest bit."""
    return ((bits << 1) | (bits >> (BITS - 1))) & ((1 << BITS) - 1)


@triton.jit
def _fixed_nbytes(width: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    return width * BITMAP_NBYTES + (1 + (BITS // 8 - 1) * BLOCK)
