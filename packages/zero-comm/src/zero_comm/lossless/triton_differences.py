"""Triton kernels for [Note: the difference buffer] in `block_frame`. A program codes one block.

`triton_frame` has the functions that the kernels share with `triton_values`. The **members** of a
block are the elements whose integers its levels store. A member's **rank** is its number among the
members.
"""

# No `from __future__ import annotations`: Triton reads the annotations of the kernels.
import triton
import triton.language as tl

from zero_comm.lossless import triton_frame as frame
from zero_comm.lossless.triton_frame import BITMAP, BITMAP_NBYTES, BLOCK, DENSE, EMPTY, LIST, RAW


@triton.jit(**frame.UNSPECIALIZED)
def choose_kernel(
    old_ptr: tl.tensor,
    new_ptr: tl.tensor,
    descriptors_ptr: tl.tensor,
    numel: tl.tensor,
    BITS: tl.constexpr,
) -> None:
    """Store the int16 descriptor of a block."""
    NUM_STARTS: tl.constexpr = 3 if BITS == 16 else 4
    present = frame.count_present(numel)
    z = _differences(old_ptr, frame.load_block(new_ptr, present, BITS), present, BITS)
    changed = tl.sum((z > 0).to(tl.int32))
    # The mode is in the lowest 4 bits, so the minimum prefers the lowest mode of equal size.
    best = present * (BITS // 8) * 16 + RAW
    for START in tl.static_range(NUM_STARTS):
        # Bytes of the levels of all z, and of z - 1 of changed elements.
        of_all = tl.zeros_like(changed) + BLOCK * (2 << START) // 8
        of_changed = _level_nbytes(changed, 2 << START)
        bound = tl.full([], 0, tl.uint32)
        for LEVEL in tl.static_range(START, NUM_STARTS):
            bound += (1 << (2 << LEVEL)) - 1
            longer = tl.sum((z >= bound).to(tl.int32) + ((z > bound).to(tl.int32) << 16))
            of_all += _level_nbytes(longer & 0xFFFF, 4 << LEVEL)
            of_changed += _level_nbytes(longer >> 16, 4 << LEVEL)
        listed = tl.where(changed < BLOCK, 1 + changed + of_changed, 1 << 20)
        best = tl.minimum(best, listed * 16 + (LIST + START))
        best = tl.minimum(best, (of_changed + BITMAP_NBYTES) * 16 + (BITMAP + START))
        best = tl.minimum(best, of_all * 16 + (DENSE + START))
    frame.store_descriptor(descriptors_ptr, best, changed == 0)


@triton.jit(**frame.UNSPECIALIZED)
def encode_kernel(
    old_ptr: tl.tensor,
    new_ptr: tl.tensor,
    descriptors_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    numel: tl.tensor,
    BITS: tl.constexpr,
) -> None:
    """Write the codes of a block. ``ends``, int64, is the end of each block in ``codes``."""
    present = frame.count_present(numel)
    mode, nbytes, end = frame.place_of_block(descriptors_ptr, ends_ptr)
    is_list, is_bitmap, num_all, width = _layout(mode, present, BITS)
    element = frame.elements(frame.EACH)
    codes_ptr += end - nbytes
    if mode != EMPTY:
        new = frame.load_block(new_ptr, present, BITS)
        z = _differences(old_ptr, new, present, BITS)
        is_member = tl.where(is_list | is_bitmap, z > 0, element < num_all)
        count = tl.sum(is_member.to(tl.int32))
        if is_list:
            tl.store(codes_ptr, count.to(tl.uint8))
            positions = tl.where(is_member, element, 0)
            frame.store_ranked(codes_ptr + 1, positions, is_member, 1)
            codes_ptr += 1 + count
        elif is_bitmap:
            tl.store(codes_ptr + tl.arange(0, frame.LANES), frame.bits_by_lane(is_member))
            codes_ptr += BITMAP_NBYTES
        rest = tl.where(mode == RAW, new, tl.where(is_list | is_bitmap, z - 1, z))
        while (count > 0) & (width <= BITS):
            largest = frame.largest_code(width)
            codes = tl.minimum(rest, largest)
            if width < 8:
                frame.store_packed(codes_ptr, codes, is_member, count, width)
            else:
                frame.store_ranked(codes_ptr, codes, is_member, width >> 3)
            codes_ptr += _level_nbytes(count, width)
            is_member = is_member & (rest >= largest)
            rest -= largest
            count = tl.sum(is_member.to(tl.int32))
            width *= 2


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
    """Change the elements of a block in place.

    A block that no encoder can have written is left unchanged and sets ``is_bad``, int32. This
    applies to all blocks if their total size exceeds ``codes_nbytes``. A block reads only its own
    bytes.
    """
    present = frame.count_present(numel)
    mode, nbytes, end = frame.place_of_block(descriptors_ptr, ends_ptr)
    is_list, is_bitmap, num_all, width = _layout(mode, present, BITS)
    element = frame.elements(frame.EACH)
    at = end - nbytes
    is_good = tl.load(ends_ptr + tl.num_programs(0) - 1) <= codes_nbytes
    if is_list | is_bitmap | (num_all > 0):
        # Each lane decodes consecutive elements of the block, or listed ones if it is a list.
        place = element
        is_member = element < num_all
        if is_list:
            is_good = is_good & (nbytes >= 1)
            length = tl.load(codes_ptr + at, mask=is_good, other=0).to(tl.int32)
            is_good = is_good & (nbytes > length)
            is_member = is_good & (element < length)
            place = frame.load_ranked(codes_ptr + at + 1, is_member, length, 8).to(tl.int32)
            previous = frame.load_ranked(codes_ptr + at, is_member, length, 8).to(tl.int32)
            is_falling = is_member & (element > 0) & (place <= previous)
            is_good = is_good & (tl.sum(is_falling.to(tl.int32)) == 0)
            at += 1 + length
        elif is_bitmap:
            is_good = is_good & (nbytes >= BITMAP_NBYTES)
            byte = tl.arange(0, frame.LANES)
            # A mask must have the shape of the loaded block, so a scalar is_good is not enough.
            is_read = byte < is_good.to(tl.int32) * frame.LANES
            bitmap = tl.load(codes_ptr + at + byte, mask=is_read, other=0).to(tl.int32)
            is_member = ((bitmap[None, :] >> tl.arange(0, frame.EACH)[:, None]) & 1) > 0
            at += BITMAP_NBYTES
        z = (is_member & (num_all == 0)).to(tl.uint32)
        is_changed = is_member
        count = tl.sum(is_member.to(tl.int32))
        is_good = is_good & (count > 0)
        while is_good & (count > 0) & (width <= BITS):
            next_at = at + _level_nbytes(count, width)
            is_good = next_at <= end
            codes = frame.load_ranked(codes_ptr + at, is_member & is_good, count, width)
            z += codes
            is_member = is_member & (codes == frame.largest_code(width))
            count = tl.sum(is_member.to(tl.int32))
            at = next_at
            width *= 2
        is_good = is_good & (at == end)
        if is_good & is_list:
            values_ptr += tl.program_id(0).to(tl.int64) * BLOCK
            is_inside = (is_changed & (place < present)).to(tl.int32)
            for ROW in tl.static_range(frame.EACH):
                here = frame.row(is_inside, ROW) > 0
                element_ptr = values_ptr + frame.row(place, ROW)
                listed = tl.load(element_ptr, mask=here, other=0)
                moved = _moved(listed.to(tl.uint32), frame.row(z, ROW), BITS)
                tl.store(element_ptr, moved.to(listed.dtype), mask=here)
        elif is_good:
            old = frame.load_block(values_ptr, present, BITS)
            new = tl.where(mode == RAW, z, _moved(old, z, BITS))
            frame.store_block(values_ptr, present, new)
    else:
        is_good = is_good & (mode == EMPTY) & (nbytes == 0)
    tl.store(is_bad_ptr, 1, mask=is_good == 0)


@triton.jit
def _differences(
    old_ptr: tl.tensor, new: tl.tensor, present: tl.tensor, BITS: tl.constexpr
) -> tl.tensor:
    MASK: tl.constexpr = (1 << BITS) - 1
    old = frame.load_block(old_ptr, present, BITS)
    moved = (_ordered(new, BITS) - _ordered(old, BITS)) & MASK
    return ((moved << 1) ^ tl.where(moved >> (BITS - 1) > 0, MASK, 0)) & MASK


@triton.jit
def _moved(old: tl.tensor, z: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Return the new bits for old bits and their ``z``."""
    MASK: tl.constexpr = (1 << BITS) - 1
    z = z & MASK
    integer = (_ordered(old & MASK, BITS) + ((z >> 1) ^ tl.where((z & 1) > 0, MASK, 0))) & MASK
    return integer ^ tl.where(integer >> (BITS - 1) > 0, 1 << (BITS - 1), MASK)


@triton.jit
def _ordered(bits: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    return bits ^ tl.where(bits >> (BITS - 1) > 0, (1 << BITS) - 1, 1 << (BITS - 1))


@triton.jit
def _level_nbytes(count: tl.tensor, width: tl.tensor) -> tl.tensor:
    return (count * width + 7) >> 3


@triton.jit
def _layout(mode: tl.tensor, present: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Return if a block is a list, if a bitmap, the members of other blocks, and the first width.

    A raw block is a level of whole elements.
    """
    NUM_STARTS: tl.constexpr = 3 if BITS == 16 else 4
    is_list = (mode >= LIST) & (mode < LIST + NUM_STARTS)
    is_bitmap = (mode >= BITMAP) & (mode < BITMAP + NUM_STARTS)
    is_dense = (mode >= DENSE) & (mode < DENSE + NUM_STARTS)
    num_all = tl.where(mode == RAW, present, tl.where(is_dense, BLOCK, 0))
    first_width = tl.where(mode == RAW, BITS, 2 << ((mode - LIST) & 3))
    return is_list, is_bitmap, num_all, first_width
