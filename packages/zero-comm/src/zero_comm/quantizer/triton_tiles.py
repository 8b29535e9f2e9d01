"""Triton kernels that quantize and dequantize, one tile per program.

[Note: tiles]
A **tile** is one or more whole blocks of a row of elements: a matrix with one block per row and
columns padded to a power of two. Programs are numbered tile by tile, row after row. Elements of
full tiles without padded columns are accessed without a mask, because masked accesses are narrow.
"""

# No `from __future__ import annotations`: Triton reads the annotations of the kernels.
import triton
import triton.language as tl

from zero_comm.quantizer import triton_arithmetic as arithmetic


@triton.jit(do_not_specialize=["numel", "num_rows", "seed"])
def encode_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    numel: tl.tensor,
    x_stride: tl.tensor,
    group_stride: tl.tensor,
    out_stride: tl.tensor,
    num_rows: tl.tensor,
    seed: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
    LARGEST_BITS: tl.constexpr,
    IS_SYMMETRIC: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
    IS_STOCHASTIC: tl.constexpr,
) -> None:
    """Quantize one tile. bf16 elements are passed as int16. See [Note: the quantized buffer]."""
    IS_INT4: tl.constexpr = KIND == "int4"
    BLOCK_NBYTES: tl.constexpr = BLOCK // 2 if IS_INT4 else BLOCK
    SCALE_NBYTES: tl.constexpr = 2 if IS_SYMMETRIC else 8
    row, tile = _place(numel, BLOCK, BLOCKS)
    group, own_row = _group_of(row, num_rows)
    num_blocks = tl.cdiv(numel.to(tl.int64), BLOCK)
    first_block = tile * BLOCKS
    first = first_block * BLOCK
    block = tl.arange(0, BLOCKS)
    column = tl.arange(0, COLUMNS)[None, :]
    offsets = block[:, None] * BLOCK + column
    num_inside = tl.minimum(numel - first, BLOCKS * BLOCK).to(tl.int32)
    is_inside = (offsets < num_inside) & (column < BLOCK)
    x_tile = x_ptr + row * x_stride + first
    if num_inside < BLOCKS * BLOCK:
        raw = tl.load(x_tile + offsets, mask=is_inside, other=0)
    elif BLOCK == COLUMNS:
        raw = tl.load(x_tile + offsets)
    else:
        raw = tl.load(x_tile + offsets, mask=column < BLOCK, other=0)
    if DTYPE == "bf16":
        x = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        x = raw.to(tl.float32)
    if HAS_ROTATION:
        x = arithmetic.rotate(x, BLOCKS, COLUMNS)
        is_inside = is_inside | (column < BLOCK)  # the rotation mixes values into the padding
    if IS_STOCHASTIC:
        group_seed = seed.to(tl.uint32) + group.to(tl.uint32) * 0x9E3779B1
        noise = arithmetic.uniform(first.to(tl.uint32) + offsets.to(tl.uint32), group_seed, own_row)
    else:
        noise = 0.0

    row_ptr = out_ptr + group * group_stride + own_row * out_stride
    scales_ptr = row_ptr + num_blocks * BLOCK_NBYTES + first_block * SCALE_NBYTES
    is_block = block < tl.minimum(num_blocks - first_block, BLOCKS).to(tl.int32)
    if IS_SYMMETRIC:
        codes, maximum = arithmetic.symmetric_codes(x, noise, LARGEST_BITS, KIND, IS_STOCHASTIC)
        _store_bytes(scales_ptr + block * 2, maximum, is_block, 2)
    else:
        IS_KEPT: tl.constexpr = not (HAS_ROTATION or IS_STOCHASTIC)
        KEPT_DTYPE: tl.constexpr = DTYPE if IS_KEPT else "none"
        TOP_INDEX: tl.constexpr = 14 if IS_INT4 else 254
        codes, lo, hi = arithmetic.asymmetric_codes(
            x, is_inside, noise, TOP_INDEX, IS_STOCHASTIC, KEPT_DTYPE
        )
        _store_bytes(scales_ptr + block * 8, lo, is_block, 4)
        _store_bytes(scales_ptr + block * 8 + 4, hi, is_block, 4)
    codes_ptr = row_ptr + first_block * BLOCK_NBYTES
    if IS_INT4:
        codes = _pack(codes, BLOCKS, COLUMNS, BLOCK)
    CODES: tl.constexpr = COLUMNS // 2 if IS_INT4 else COLUMNS
    byte = tl.arange(0, CODES)[None, :]
    is_code = is_block[:, None] & (byte < BLOCK_NBYTES)
    tl.store(codes_ptr + block[:, None] * BLOCK_NBYTES + byte, codes.to(tl.uint8), mask=is_code)
    if tile == 0:
        used = num_blocks * (BLOCK_NBYTES + SCALE_NBYTES)
        padding = used + tl.arange(0, 16)
        tl.store(row_ptr + padding, tl.zeros([16], tl.uint8), mask=padding < tl.cdiv(used, 16) * 16)


@triton.jit(do_not_specialize=["numel", "num_rows"])
def decode_kernel(
    rows_ptr: tl.tensor,
    out_ptr: tl.tensor,
    numel: tl.tensor,
    group_stride: tl.tensor,
    rows_stride: tl.tensor,
    num_rows: tl.tensor,
    out_stride: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    DTYPE: tl.constexpr,
    IS_SYMMETRIC: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
) -> None:
    """Dequantize one tile. bf16 elements are written as int16."""
    row, tile = _place(numel, BLOCK, BLOCKS)
    group, own_row = _group_of(row, num_rows)
    row_ptr = rows_ptr + group * group_stride + own_row * rows_stride
    WIDTH: tl.constexpr = 4 if DTYPE == "fp32" else 8
    values = _decode_tile(
        row_ptr, numel, tile, BLOCK, BLOCKS, COLUMNS, KIND, IS_SYMMETRIC, HAS_ROTATION, WIDTH
    )
    if DTYPE == "bf16":
        values = arithmetic.bfloat16_bits(values).to(tl.int16)
    _store_tile(out_ptr + row * out_stride, values, numel, tile, BLOCK, BLOCKS, COLUMNS)


@triton.jit(do_not_specialize=["numel", "num_rows"])
def decode_sum_kernel(
    rows_ptr: tl.tensor,
    out_ptr: tl.tensor,
    numel: tl.tensor,
    group_stride: tl.tensor,
    rows_stride: tl.tensor,
    num_rows: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    IS_SYMMETRIC: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
) -> None:
    """Sum one tile over all rows of a group, in row order."""
    group, tile = _place(numel, BLOCK, BLOCKS)
    row_ptr = rows_ptr + group * group_stride
    total = _decode_tile(
        row_ptr, numel, tile, BLOCK, BLOCKS, COLUMNS, KIND, IS_SYMMETRIC, HAS_ROTATION, 4
    )
    for _ in range(1, num_rows):
        row_ptr += rows_stride
        total += _decode_tile(
            row_ptr, numel, tile, BLOCK, BLOCKS, COLUMNS, KIND, IS_SYMMETRIC, HAS_ROTATION, 4
        )
    _store_tile(out_ptr + group * numel, total, numel, tile, BLOCK, BLOCKS, COLUMNS)


@triton.jit
def _group_of(row: tl.tensor, num_rows: tl.tensor) -> tl.tensor:
    """Return a row's group and its index within the group, as int64."""
    index = row.to(tl.int32)  # 64-bit division is slow
    group = index // num_rows
    return group.to(tl.int64), (index - group * num_rows).to(tl.int64)


@triton.jit
def _place(numel: tl.tensor, BLOCK: tl.constexpr, BLOCKS: tl.constexpr) -> tl.tensor:
    """Return the row and tile of this program as int64, because offsets may exceed 32 bits."""
    num_tiles = tl.cdiv(numel.to(tl.int64), BLOCK * BLOCKS).to(tl.int32)
    program = tl.program_id(0)  # a 64-bit division takes about 100 instructions
    row = program // num_tiles
    return row.to(tl.int64), (program - row * num_tiles).to(tl.int64)


@triton.jit
def _store_tile(
    row_ptr: tl.tensor,
    values: tl.tensor,
    numel: tl.tensor,
    tile: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Store the part of a tile that is inside the row. See [Note: tiles]."""
    column = tl.arange(0, COLUMNS)[None, :]
    offsets = tl.arange(0, BLOCKS)[:, None] * BLOCK + column
    first = tile * (BLOCKS * BLOCK)
    num_inside = tl.minimum(numel - first, BLOCKS * BLOCK).to(tl.int32)
    ptrs = row_ptr + first + offsets
    if num_inside < BLOCKS * BLOCK:
        tl.store(ptrs, values, mask=(offsets < num_inside) & (column < BLOCK))
    elif BLOCK == COLUMNS:
        tl.store(ptrs, values)
    else:
        tl.store(ptrs, values, mask=column < BLOCK)


@triton.jit
def _decode_tile(
    row_ptr: tl.tensor,
    numel: tl.tensor,
    tile: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    IS_SYMMETRIC: tl.constexpr,
    HAS_ROTATION: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    IS_INT4: tl.constexpr = KIND == "int4"
    BLOCK_NBYTES: tl.constexpr = BLOCK // 2 if IS_INT4 else BLOCK
    SCALE_NBYTES: tl.constexpr = 2 if IS_SYMMETRIC else 8
    num_blocks = tl.cdiv(numel.to(tl.int64), BLOCK)
    first_block = tile * BLOCKS
    block = tl.arange(0, BLOCKS)
    column = tl.arange(0, COLUMNS)[None, :]
    is_block = block < tl.minimum(num_blocks - first_block, BLOCKS).to(tl.int32)
    codes_ptr = row_ptr + first_block * BLOCK_NBYTES + block[:, None] * BLOCK_NBYTES
    # Each byte of 4-bit codes is loaded twice, the second time from the cache. A thread loads as
    # many codes at once as it stores elements, or values would move between threads via memory.
    codes_ptr = tl.max_contiguous(codes_ptr + (column % BLOCK_NBYTES), [1, WIDTH])
    is_code = is_block[:, None] & (column < BLOCK)
    byte = tl.load(codes_ptr, mask=is_code, other=0).to(tl.int32)
    scales_ptr = row_ptr + num_blocks * BLOCK_NBYTES + first_block * SCALE_NBYTES
    is_second = column >= BLOCK_NBYTES
    if IS_SYMMETRIC:
        step = arithmetic.symmetric_step(_load_bytes(scales_ptr + block * 2, is_block, 2), KIND)
        if KIND == "int8":
            levels = ((byte << 24) >> 24).to(tl.float32)
        elif IS_INT4:
            levels = (tl.where(is_second, byte + 8, byte << 4) << 24 >> 28).to(tl.float32)
        else:
            levels = arithmetic.float8_value(byte, KIND)
        values = levels * step[:, None]
    else:
        lo = _load_bytes(scales_ptr + block * 8, is_block, 4).to(tl.float32, bitcast=True)
        hi = _load_bytes(scales_ptr + block * 8 + 4, is_block, 4).to(tl.float32, bitcast=True)
        codes = tl.where(is_second, byte >> 4, byte & 15) if IS_INT4 else byte
        TOP_INDEX: tl.constexpr = 14 if IS_INT4 else 254
        values = arithmetic.asymmetric_values(codes, lo, hi, TOP_INDEX)
    if HAS_ROTATION:
        values = arithmetic.rotate(values, BLOCKS, COLUMNS)
    return values


@triton.jit
def _pack(
    codes: tl.tensor, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """Combine codes ``j`` and ``j + BLOCK / 2`` of each block into one number."""
    HALF: tl.constexpr = COLUMNS // 2
    if BLOCK == COLUMNS:
        weights = 1 + 15 * tl.arange(0, 2)[None, :, None]
        return tl.sum(tl.reshape(codes, [BLOCKS, 2, HALF]) * weights, axis=1)
    else:  # with padding columns the halves of a block are not those of the matrix
        first = tl.arange(0, HALF)[None, :] + tl.zeros([BLOCKS, 1], tl.int32)
        second = tl.minimum(first + BLOCK // 2, COLUMNS - 1)
        return tl.gather(codes, first, axis=1) + 16 * tl.gather(codes, second, axis=1)


@triton.jit
def _store_bytes(
    ptr: tl.tensor, values: tl.tensor, mask: tl.tensor, NUM_BYTES: tl.constexpr
) -> None:
    """Store the low ``NUM_BYTES`` of int32 ``values``, little-endian, at any alignment."""
    byte = tl.arange(0, NUM_BYTES)[None, :]
    shifted = values[:, None] >> (8 * byte)
    tl.store(ptr[:, None] + byte, shifted.to(tl.uint8), mask=mask[:, None] & (byte >= 0))


@triton.jit
def _load_bytes(ptr: tl.tensor, mask: tl.tensor, NUM_BYTES: tl.constexpr) -> tl.tensor:
    """Load little-endian integers of ``NUM_BYTES`` as int32, at any alignment."""
    value = tl.load(ptr, mask=mask, other=0).to(tl.int32)
    for byte in tl.static_range(1, NUM_BYTES):
        value = value | (tl.load(ptr + byte, mask=mask, other=0).to(tl.int32) << (8 * byte))
    return value
