"""Functions that the Triton kernels of both lossless codings share.

[Note: the block frame] in `block_frame` defines the bytes. One program, of one warp, handles one
block, so a block's mode and width are scalars that the program branches on. The elements of a block
form a matrix of ``LANES`` columns. In a warp of ``LANES`` threads each thread (lane) holds one
column, so a column's sum needs no exchange between threads. Elements are passed as int16 or int32
and processed as uint32. Descriptors and codes may start at any even address. The kernels are not
specialized on addresses, so one compilation serves all.
"""

# No `from __future__ import annotations`: Triton reads the annotations of the kernels.
import triton
import triton.language as tl

from zero_comm.lossless import block_frame

BLOCK = tl.constexpr(block_frame.BLOCK_NUMEL)
MODE_SHIFT = tl.constexpr(block_frame.MODE_SHIFT)
NBYTES_MASK = tl.constexpr(block_frame.NBYTES_MASK)
EMPTY = tl.constexpr(block_frame.EMPTY)
RAW = tl.constexpr(block_frame.RAW)
LIST = tl.constexpr(block_frame.LIST)
BITMAP = tl.constexpr(block_frame.BITMAP)
DENSE = tl.constexpr(block_frame.DENSE)
CODED = tl.constexpr(block_frame.CODED)
MAX_WIDTH = tl.constexpr(block_frame.MAX_WIDTH)
BITMAP_NBYTES = tl.constexpr(block_frame.BITMAP_NBYTES)
LANES = tl.constexpr(32)
EACH = tl.constexpr(block_frame.BLOCK_NUMEL // 32)  # elements per lane
UNSPECIALIZED = {  # arguments of `triton.jit`
    "do_not_specialize": ["numel", "codes_nbytes"],
    "do_not_specialize_on_alignment": ["descriptors_ptr", "codes_ptr"],
}


@triton.jit
def elements(NUM: tl.constexpr) -> tl.tensor:
    """Return the numbers of the first ``NUM`` elements of each lane."""
    return tl.arange(0, LANES)[None, :] * EACH + tl.arange(0, NUM)[:, None]


@triton.jit
def count_present(numel: tl.tensor) -> tl.tensor:
    """Return how many elements the program's block has, 1 to 256."""
    return tl.minimum(numel - tl.program_id(0).to(tl.int64) * BLOCK, BLOCK).to(tl.int32)


@triton.jit
def load_block(ptr: tl.tensor, present: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Return the bits of the program's block, with zeros after the last element."""
    ptr += tl.program_id(0).to(tl.int64) * BLOCK
    raw = _load_present(ptr, elements(EACH), present)
    if BITS == 32:
        # A thread loads at most 16 bytes at once, which is half of its 8 elements.
        first = elements(EACH // 2)
        high = _load_present(ptr, first + EACH // 2, present)
        both = tl.join(_load_present(ptr, first, present), high)
        raw = tl.reshape(tl.permute(both, 2, 0, 1), [EACH, LANES])
    return raw.to(tl.uint32) & ((1 << BITS) - 1)


@triton.jit
def _load_present(ptr: tl.tensor, element: tl.tensor, present: tl.tensor) -> tl.tensor:
    if present < BLOCK:  # only the last block pays for a mask
        raw = tl.load(ptr + element, mask=element < present, other=0)
    else:
        raw = tl.load(ptr + element)
    return raw


@triton.jit
def store_block(ptr: tl.tensor, present: tl.tensor, bits: tl.tensor) -> None:
    ptr += tl.program_id(0).to(tl.int64) * BLOCK
    values = bits.to(ptr.dtype.element_ty)
    if present < BLOCK:
        tl.store(ptr + elements(EACH), values, mask=elements(EACH) < present)
    else:
        tl.store(ptr + elements(EACH), values)


@triton.jit
def store_descriptor(ptr: tl.tensor, best: tl.tensor, is_empty: tl.tensor) -> None:
    """Store a block's int16 descriptor. ``best`` holds bytes * 16 + mode."""
    descriptor = tl.where(is_empty, EMPTY, ((best & 15) << MODE_SHIFT) + (best >> 4))
    tl.store(ptr + tl.program_id(0), descriptor.to(tl.int16))


@triton.jit
def place_of_block(descriptors_ptr: tl.tensor, ends_ptr: tl.tensor) -> tl.tensor:
    """Return the mode, the bytes and the end offset of the program's block."""
    descriptor = tl.load(descriptors_ptr + tl.program_id(0)).to(tl.int32)
    end = tl.load(ends_ptr + tl.program_id(0))
    return (descriptor >> MODE_SHIFT) & 31, descriptor & NBYTES_MASK, end


@triton.jit
def largest_code(width: tl.tensor) -> tl.tensor:
    """Return the largest code of ``width`` bits, 1 to 32, as uint32. For 0 bits it is undefined."""
    return tl.full([], 0xFFFFFFFF, tl.uint32) >> (32 - width)


@triton.jit
def row(x: tl.tensor, ROW: tl.constexpr) -> tl.tensor:
    """Return element ``ROW`` of each lane, a constant, so the compiler selects a register."""
    return tl.sum(tl.where(tl.arange(0, EACH)[:, None] == ROW, x, 0), 0)


@triton.jit
def count_before(is_member: tl.tensor) -> tl.tensor:
    """Return for each lane the number of members in the lanes before."""
    held = tl.sum(is_member.to(tl.int32), 0)
    return tl.cumsum(held, 0) - held


@triton.jit
def bits_by_lane(is_set: tl.tensor) -> tl.tensor:
    """Return one byte per lane with the bits of its elements, the first in the lowest bit."""
    return tl.sum(is_set.to(tl.int32) << tl.arange(0, EACH)[:, None], 0).to(tl.uint8)


@triton.jit
def store_ranked(ptr: tl.tensor, codes: tl.tensor, is_member: tl.tensor, nbytes: tl.tensor) -> None:
    """Store ``nbytes`` bytes of each member in the order of ranks, the lowest byte first."""
    for byte in range(nbytes):
        rank = count_before(is_member)
        for ROW in tl.static_range(EACH):
            here = row(is_member.to(tl.int32), ROW)
            part = row(codes, ROW) >> (8 * byte)
            tl.store(ptr + rank * nbytes + byte, part.to(tl.uint8), mask=here > 0)
            rank += here


@triton.jit
def store_packed(
    level_ptr: tl.tensor, codes: tl.tensor, is_member: tl.tensor, count: tl.tensor, width: tl.tensor
) -> None:
    """Store a level of 2-bit or 4-bit codes.

    Each lane first concatenates the codes of its members into a word. Then neighbouring groups of
    lanes are concatenated in turn, until lane k has the codes of the ranks from ``EACH`` k on. A
    group's codes are at the start of its words, with zeros behind them.
    """
    lane = tl.arange(0, LANES)
    member = is_member.to(tl.int32)
    shift = (tl.cumsum(member, 0) - member) * width
    word = tl.sum(tl.where(is_member, codes << shift, 0), 0)
    held = tl.sum(member, 0)  # codes of the lane's group
    slot_mask = largest_code(width * EACH)
    for STEP in tl.static_range(5):
        size = 1 << STEP  # lanes of a group
        other = tl.gather(held, lane ^ size, 0)
        is_right = (lane & size) > 0
        within = lane & (2 * size - 1)
        # The place, in codes of the right group, at which this lane's word begins.
        begin = within * EACH - tl.where(is_right, other, held)
        held += other
        index = begin >> 3
        right = lane - within + size
        low = tl.gather(word, (right + index) & (LANES - 1), 0)
        low = tl.where((index >= 0) & (index < size), low, 0)
        high = tl.gather(word, (right + index + 1) & (LANES - 1), 0)
        high = tl.where((index >= -1) & (index + 1 < size), high, 0)
        offset = (begin & (EACH - 1)) * width
        joined = (low >> offset) | ((high << 1) << (width * EACH - 1 - offset))
        word = (tl.where(is_right, 0, word) | joined) & slot_mask
    q = (count * width + 7) >> 3
    for half in range(width >> 1):
        byte = half * (2 * LANES) + tl.arange(0, 2 * LANES)
        packed = tl.zeros([2 * LANES], tl.uint32)
        for part in range(8 // width):
            rank = byte + part * q
            code = tl.gather(word, (rank >> 3) & (LANES - 1), 0)
            code = (code >> ((rank & 7) * width)) & largest_code(width)
            packed = packed | (code << (part * width))
        tl.store(level_ptr + byte, packed.to(tl.uint8), mask=byte < q)


@triton.jit
def load_ranked(ptr: tl.tensor, is_here: tl.tensor, num: tl.tensor, width: tl.tensor) -> tl.tensor:
    """Return the uint32 codes of a level of ``num`` members, zeros for other elements."""
    codes = tl.zeros([EACH, LANES], tl.uint32)
    own_width = tl.minimum(width, 8)  # bits within a byte
    nbytes = width // own_width
    q = (num * own_width + 7) >> 3
    for byte in range(nbytes):
        rank = count_before(is_here)
        for ROW in tl.static_range(EACH):
            here = row(is_here.to(tl.int32), ROW)
            # The position of the code within its byte.
            part = (rank >= q).to(tl.int32)
            part += (rank >= 2 * q).to(tl.int32) + (rank >= 3 * q).to(tl.int32)
            code_ptr = ptr + (rank - part * q) * nbytes + byte
            shared = tl.load(code_ptr, mask=here > 0, other=0).to(tl.uint32)
            code = ((shared >> (part * own_width)) & largest_code(own_width)) << (8 * byte)
            is_own = tl.arange(0, EACH)[:, None] == ROW
            codes = tl.where(is_own, codes | code[None, :], codes)
            rank += here
    return codes
