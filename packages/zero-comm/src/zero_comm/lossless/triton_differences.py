"""Triton kernels for [Note: the difference buffer] in `block_frame`. A program codes one tile.

`triton_frame` has the functions that the kernels share with `triton_values`. The **members** of a
block are the elements whose integers its levels store. A member's **rank** is its number among the
members. Blocks of one tile may have different modes and widths, so the whole tile loops over all
widths with a mask.
"""

# No `from __future__ import annotations`: Triton reads the annotations of the kernels.
import triton
import triton.language as tl

from zero_comm.lossless import triton_frame as frame
from zero_comm.lossless.triton_frame import BITMAP, BITMAP_NBYTES, BLOCK, DENSE, EMPTY, LIST, RAW


@triton.jit(do_not_specialize=["numel"], do_not_specialize_on_alignment=["descriptors_ptr"])
def choose_kernel(
    old_ptr: tl.tensor,
    new_ptr: tl.tensor,
    descriptors_ptr: tl.tensor,
    numel: tl.tensor,
    BITS: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Store the int16 descriptors of a tile's blocks."""
    NUM_STARTS: tl.constexpr = 3 if BITS == 16 else 4
    block, present = frame.blocks_of_tile(numel, BLOCKS)
    new = frame.load_tile(new_ptr, numel, BITS, BLOCKS)
    z = _differences(frame.load_tile(old_ptr, numel, BITS, BLOCKS), new, BITS)
    changed = tl.sum((z > 0).to(tl.int32), 1)
    # The mode is in the lowest 4 bits, so the minimum prefers the lowest mode of equal size.
    best = present * (BITS // 8) * 16 + RAW
    for START in tl.static_range(NUM_STARTS):
        of_all, of_changed = _levels_nbytes(z, changed, 2 << START, BITS)
        listed = tl.where(changed < BLOCK, 1 + changed + of_changed, 1 << 20)
        best = tl.minimum(best, listed * 16 + (LIST + START))
        best = tl.minimum(best, (of_changed + BITMAP_NBYTES) * 16 + (BITMAP + START))
        best = tl.minimum(best, of_all * 16 + (DENSE + START))
    frame.store_descriptors(descriptors_ptr, block, present, best, changed == 0)


@triton.jit(
    do_not_specialize=["numel"], do_not_specialize_on_alignment=["descriptors_ptr", "codes_ptr"]
)
def encode_kernel(
    old_ptr: tl.tensor,
    new_ptr: tl.tensor,
    descriptors_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    numel: tl.tensor,
    BITS: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Write the codes of a tile. ``ends``, int64, is the end of each block in ``codes``."""
    NUM_STARTS: tl.constexpr = 3 if BITS == 16 else 4
    present, mode, nbytes, end = frame.places_of_tile(descriptors_ptr, ends_ptr, numel, BLOCKS)
    is_list, is_bitmap, is_dense, start = _layout(mode, NUM_STARTS)
    lane = tl.arange(0, BLOCK)[None, :]
    new = frame.load_tile(new_ptr, numel, BITS, BLOCKS)
    z = _differences(frame.load_tile(old_ptr, numel, BITS, BLOCKS), new, BITS)
    begin_ptr = codes_ptr + (end - nbytes)
    row_ptr = begin_ptr[:, None]

    is_raw = mode == RAW
    if tl.max(is_raw.to(tl.int32), 0) > 0:
        is_element = is_raw[:, None] & (lane < present[:, None])
        frame.store_wide(row_ptr + lane * (BITS // 8), new, is_element, BITS)

    is_member = ((z > 0) & (is_list | is_bitmap)[:, None]) | is_dense[:, None]
    count = tl.sum(is_member.to(tl.int32), 1)
    if tl.max(is_list.to(tl.int32), 0) > 0:
        tl.store(begin_ptr, count.to(tl.uint8), mask=is_list)
        positions = tl.broadcast_to(lane, [BLOCKS, BLOCK]).to(tl.uint8)
        tl.store(row_ptr + 1 + _ranks(is_member), positions, mask=is_member & is_list[:, None])
    if tl.max(is_bitmap.to(tl.int32), 0) > 0:
        eights = tl.reshape(is_member.to(tl.int32), [BLOCKS, BITMAP_NBYTES, 8])
        bitmap = tl.sum(eights << tl.arange(0, 8)[None, None, :], 2)
        byte = tl.arange(0, BITMAP_NBYTES)[None, :]
        tl.store(row_ptr + byte, bitmap.to(tl.uint8), mask=is_bitmap[:, None])

    level_ptr = begin_ptr + _header_nbytes(is_list, is_bitmap, count)
    rest = tl.where(is_dense[:, None], z, z - 1)
    for LEVEL in tl.static_range(NUM_STARTS + 1):
        is_begun = (start <= LEVEL)[:, None]
        is_here = is_member & is_begun
        count = tl.sum(is_here.to(tl.int32), 1)
        if tl.max(count, 0) > 0:
            _write_level(level_ptr[:, None], rest, is_here, count[:, None], 2 << LEVEL)
        level_ptr += _level_nbytes(count, 2 << LEVEL)
        if LEVEL < NUM_STARTS:
            largest = (1 << (2 << LEVEL)) - 1
            is_member = is_member & ((rest >= largest) | (is_begun == 0))
            rest = tl.where(is_begun, rest - largest, rest)


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
    """Change the elements of a tile in place.

    A block that no encoder can have written is left unchanged and sets ``is_bad``, int32. All
    blocks count as such if their total size exceeds ``codes_nbytes``. A block reads only its own
    bytes, even if they are damaged.
    """
    NUM_STARTS: tl.constexpr = 3 if BITS == 16 else 4
    present, mode, nbytes, end = frame.places_of_tile(descriptors_ptr, ends_ptr, numel, BLOCKS)
    is_list, is_bitmap, is_dense, start = _layout(mode, NUM_STARTS)
    has_levels = is_list | is_bitmap | is_dense
    is_raw = mode == RAW
    lane = tl.arange(0, BLOCK)[None, :]
    begin_ptr = codes_ptr + (end - nbytes)
    row_ptr = begin_ptr[:, None]

    is_good = (frame.total_of(ends_ptr, numel, present) <= codes_nbytes) & (
        has_levels | is_raw | ((mode == EMPTY) & (nbytes == 0))
    )
    is_good = is_good & ((is_raw == 0) | (nbytes == present * (BITS // 8)))
    is_good = is_good & (nbytes >= _header_nbytes(is_list, is_bitmap, 0))
    listed = tl.load(begin_ptr, mask=is_list & is_good, other=0).to(tl.int32)
    header_nbytes = _header_nbytes(is_list, is_bitmap, listed)
    is_good = is_good & (nbytes >= header_nbytes)

    # Lane k handles element k of a block, but in a list the element at the k-th listed position.
    is_listed = (is_list & is_good)[:, None] & (lane < listed[:, None])
    position = tl.load(row_ptr + 1 + lane, mask=is_listed, other=0).to(tl.int32)
    has_previous = is_listed & (lane > 0)
    previous = tl.load(row_ptr + lane, mask=has_previous, other=0).to(tl.int32)
    is_falling = has_previous & (position <= previous)
    is_good = is_good & (tl.sum(is_falling.to(tl.int32), 1) == 0)
    place = tl.where(is_list[:, None], position, lane)
    bitmap = tl.load(row_ptr + lane // 8, mask=(is_bitmap & is_good)[:, None], other=0)
    is_set = ((bitmap.to(tl.int32) >> (lane & 7)) & 1) > 0
    is_member = (is_listed | is_set | is_dense[:, None]) & is_good[:, None]
    count = tl.sum(is_member.to(tl.int32), 1)
    is_good = is_good & ((has_levels == 0) | (count > 0))
    is_changed = is_member

    at = (end - nbytes) + header_nbytes
    z = tl.zeros([BLOCKS, BLOCK], tl.uint32)
    for LEVEL in tl.static_range(NUM_STARTS + 1):
        is_begun = (start <= LEVEL)[:, None]
        count = tl.sum((is_member & is_begun).to(tl.int32), 1)
        next_at = at + _level_nbytes(count, 2 << LEVEL)
        is_good = is_good & ((has_levels == 0) | (next_at <= end))
        is_member = is_member & is_good[:, None]
        is_longer = is_member
        if tl.max(count, 0) > 0:
            is_here = is_member & is_begun
            level_ptr = codes_ptr + at
            codes = _read_level(level_ptr[:, None], is_here, count[:, None], 2 << LEVEL)
            z += codes
            is_longer = is_member & ((codes == ((1 << (2 << LEVEL)) - 1)) | (is_begun == 0))
        is_member = is_longer
        at = next_at
    is_good = is_good & ((has_levels == 0) | (at == end))

    z = tl.where(is_dense[:, None], z, z + 1)
    is_inside = (place < present[:, None]) & is_good[:, None]
    is_changed = is_changed & is_inside
    first_ptr = values_ptr + tl.program_id(0).to(tl.int64) * (BLOCKS * BLOCK)
    element_ptr = first_ptr + (tl.arange(0, BLOCKS)[:, None] * BLOCK + place)
    old = tl.load(element_ptr, mask=is_changed, other=0)
    new = _moved(frame.unsigned(old, BITS), z, BITS)
    if tl.max(is_raw.to(tl.int32), 0) > 0:
        is_element = is_inside & is_raw[:, None]
        raw = frame.load_wide(row_ptr + lane * (BITS // 8), is_element, BITS)
        new = tl.where(is_raw[:, None], raw, new)
        is_changed = is_changed | is_element
    tl.store(element_ptr, new.to(old.dtype), mask=is_changed)
    frame.report_bad(is_bad_ptr, present, is_good)


@triton.jit
def _differences(old: tl.tensor, new: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    MASK: tl.constexpr = (1 << BITS) - 1
    moved = (_ordered(new, BITS) - _ordered(old, BITS)) & MASK
    return ((moved << 1) ^ tl.where(moved >> (BITS - 1) > 0, MASK, 0)) & MASK


@triton.jit
def _moved(old: tl.tensor, z: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Return the new bits for old bits and their ``z``."""
    MASK: tl.constexpr = (1 << BITS) - 1
    z = z & MASK
    integer = (_ordered(old, BITS) + ((z >> 1) ^ tl.where((z & 1) > 0, MASK, 0))) & MASK
    return integer ^ tl.where(integer >> (BITS - 1) > 0, 1 << (BITS - 1), MASK)


@triton.jit
def _ordered(bits: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    return bits ^ tl.where(bits >> (BITS - 1) > 0, (1 << BITS) - 1, 1 << (BITS - 1))


@triton.jit
def _level_nbytes(count: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    return (count * WIDTH + 7) >> 3


@triton.jit
def _levels_nbytes(
    z: tl.tensor, changed: tl.tensor, WIDTH: tl.constexpr, BITS: tl.constexpr
) -> tl.tensor:
    """Return the bytes of the levels of all ``z``, and of ``z - 1`` of changed elements."""
    of_all = tl.zeros_like(changed) + BLOCK * WIDTH // 8
    of_changed = _level_nbytes(changed, WIDTH)
    bound = tl.full([], 0, tl.uint32)
    for LEVEL in tl.static_range(4):
        if (WIDTH << LEVEL) < BITS:
            bound += (1 << (WIDTH << LEVEL)) - 1
            longer = tl.sum((z >= bound).to(tl.int32) + ((z > bound).to(tl.int32) << 16), 1)
            of_all += _level_nbytes(longer & 0xFFFF, WIDTH << (LEVEL + 1))
            of_changed += _level_nbytes(longer >> 16, WIDTH << (LEVEL + 1))
    return of_all, of_changed


@triton.jit
def _layout(mode: tl.tensor, NUM_STARTS: tl.constexpr) -> tl.tensor:
    """Return masks of list, bitmap and dense blocks, and each block's ``s``."""
    is_list = (mode >= LIST) & (mode < LIST + NUM_STARTS)
    is_bitmap = (mode >= BITMAP) & (mode < BITMAP + NUM_STARTS)
    is_dense = (mode >= DENSE) & (mode < DENSE + NUM_STARTS)
    return is_list, is_bitmap, is_dense, (mode - LIST) & 3


@triton.jit
def _header_nbytes(is_list: tl.tensor, is_bitmap: tl.tensor, count: tl.tensor) -> tl.tensor:
    """Return the bytes before the levels of a block. A list has ``count`` positions."""
    return tl.where(is_list, 1 + count, tl.where(is_bitmap, BITMAP_NBYTES, 0))


@triton.jit
def _ranks(is_member: tl.tensor) -> tl.tensor:
    return tl.cumsum(is_member.to(tl.int32), 1) - 1


@triton.jit
def _write_level(
    level_ptr: tl.tensor, rest: tl.tensor, is_here: tl.tensor, count: tl.tensor, WIDTH: tl.constexpr
) -> None:
    codes = tl.minimum(rest, (1 << WIDTH) - 1)
    rank = _ranks(is_here)
    if WIDTH >= 8:
        frame.store_wide(level_ptr + rank * (WIDTH // 8), codes, is_here, WIDTH)
    else:
        q = _level_nbytes(count, WIDTH)
        packed = _packed(codes, rank, count, q, WIDTH)
        byte = tl.arange(0, BLOCK * WIDTH // 8)[None, :]
        tl.store(level_ptr + byte, packed.to(tl.uint8), mask=byte < q)


@triton.jit
def _packed(
    codes: tl.tensor, rank: tl.tensor, count: tl.tensor, q: tl.tensor, WIDTH: tl.constexpr
) -> tl.tensor:
    """Return the level bytes of 2-bit or 4-bit codes, in the first ``q`` columns of each row.

    Each lane builds one part of a byte and finds the member of the wanted rank by binary search,
    because ranks ascend. No two threads therefore write to the same byte of memory.
    """
    PARTS: tl.constexpr = 8 // WIDTH
    NBYTES: tl.constexpr = BLOCK // PARTS
    lane = tl.arange(0, BLOCK)[None, :]
    byte = lane % NBYTES
    wanted = byte + lane // NBYTES * q
    at = tl.zeros_like(rank)
    for STEP in tl.static_range(8):
        probe = tl.gather(rank, at + ((128 >> STEP) - 1), 1)
        at += tl.where(probe < wanted, 128 >> STEP, 0)
    taken = tl.gather(codes, at, 1)
    taken = tl.where((byte < q) & (wanted < count), taken, 0)
    shift = tl.arange(0, PARTS)[None, :, None] * WIDTH
    parts = tl.reshape(taken, [codes.shape[0], PARTS, NBYTES])
    return tl.sum(parts << shift.to(tl.uint32), 1)


@triton.jit
def _read_level(
    level_ptr: tl.tensor, is_here: tl.tensor, count: tl.tensor, WIDTH: tl.constexpr
) -> tl.tensor:
    """Return the uint32 codes of one level, zero for elements without a code."""
    rank = _ranks(is_here)
    if WIDTH >= 8:
        codes = frame.load_wide(level_ptr + rank * (WIDTH // 8), is_here, WIDTH)
    else:
        q = _level_nbytes(count, WIDTH)
        part = (rank >= q).to(tl.int32)  # position of the code within its byte
        if WIDTH == 2:
            part += (rank >= 2 * q).to(tl.int32) + (rank >= 3 * q).to(tl.int32)
        byte = tl.load(level_ptr + (rank - part * q), mask=is_here, other=0).to(tl.uint32)
        codes = (byte >> (part * WIDTH).to(tl.uint32)) & ((1 << WIDTH) - 1)
    return codes
