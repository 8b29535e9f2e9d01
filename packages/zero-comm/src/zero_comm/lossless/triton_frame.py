"""Functions that the Triton kernels of both lossless codings share.

[Note: the block frame] in `block_frame` defines the bytes. A program handles a **tile** of
consecutive blocks: a matrix with one block of 256 elements per row. Elements are passed as int16 or
int32 and processed as uint32. Descriptors and codes may start at any even address. The kernels are
not specialized on it, so one compilation serves all addresses.
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


@triton.jit
def blocks_of_tile(numel: tl.tensor, BLOCKS: tl.constexpr) -> tl.tensor:
    """Return the int64 numbers of the tile's blocks, and how many elements each has, 0 to 256."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    return block, tl.minimum(tl.maximum(numel - block * BLOCK, 0), BLOCK).to(tl.int32)


@triton.jit
def load_tile(
    ptr: tl.tensor, numel: tl.tensor, BITS: tl.constexpr, BLOCKS: tl.constexpr
) -> tl.tensor:
    """Return the bits of a tile, with zeros after the last element."""
    first = tl.program_id(0).to(tl.int64) * (BLOCKS * BLOCK)
    offsets = tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    num_inside = tl.minimum(numel - first, BLOCKS * BLOCK).to(tl.int32)
    if num_inside < BLOCKS * BLOCK:  # only the last tile pays for a mask
        raw = tl.load(ptr + first + offsets, mask=offsets < num_inside, other=0)
    else:
        raw = tl.load(ptr + first + offsets)
    return unsigned(raw, BITS)


@triton.jit
def unsigned(raw: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    return raw.to(tl.uint32) & ((1 << BITS) - 1)


@triton.jit
def store_descriptors(
    ptr: tl.tensor, block: tl.tensor, present: tl.tensor, best: tl.tensor, is_empty: tl.tensor
) -> None:
    """Store int16 descriptors. ``best`` holds bytes * 16 + mode of each block."""
    descriptors = ((best & 15) << MODE_SHIFT) + (best >> 4)
    descriptors = tl.where(is_empty, EMPTY, descriptors)
    tl.store(ptr + block, descriptors.to(tl.int16), mask=present > 0)


@triton.jit
def places_of_tile(
    descriptors_ptr: tl.tensor, ends_ptr: tl.tensor, numel: tl.tensor, BLOCKS: tl.constexpr
) -> tl.tensor:
    """Return number of elements, mode, bytes and end offset of each block of the tile."""
    block, present = blocks_of_tile(numel, BLOCKS)
    descriptors = tl.load(descriptors_ptr + block, mask=present > 0, other=0).to(tl.int32)
    end = tl.load(ends_ptr + block, mask=present > 0, other=0)
    return present, (descriptors >> MODE_SHIFT) & 31, descriptors & NBYTES_MASK, end


@triton.jit
def total_of(ends_ptr: tl.tensor, numel: tl.tensor, present: tl.tensor) -> tl.tensor:
    """Return the bytes of all blocks, repeated for each block of the tile.

    Triton 3.9's interpreter mishandles a condition that combines a scalar with a tensor.
    """
    last = tl.cdiv(numel.to(tl.int64), BLOCK) - 1
    return tl.load(ends_ptr + last + tl.zeros_like(present))


@triton.jit
def report_bad(is_bad_ptr: tl.tensor, present: tl.tensor, is_good: tl.tensor) -> None:
    num_bad = tl.sum(((present > 0) & (is_good == 0)).to(tl.int32), 0)
    tl.store(is_bad_ptr, 1, mask=num_bad > 0)


@triton.jit
def store_wide(ptr: tl.tensor, values: tl.tensor, mask: tl.tensor, WIDTH: tl.constexpr) -> None:
    """Store integers of ``WIDTH`` bits, lowest byte first, at addresses of any alignment."""
    for BYTE in tl.static_range(WIDTH // 8):
        tl.store(ptr + BYTE, (values >> (8 * BYTE)).to(tl.uint8), mask=mask)


@triton.jit
def load_wide(ptr: tl.tensor, mask: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Load integers of ``WIDTH`` bits from any alignment as uint32, zeros where masked out."""
    values = tl.load(ptr, mask=mask, other=0).to(tl.uint32)
    for BYTE in tl.static_range(1, WIDTH // 8):
        values = values | (tl.load(ptr + BYTE, mask=mask, other=0).to(tl.uint32) << (8 * BYTE))
    return values
