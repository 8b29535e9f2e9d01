"""Quantizer backend in plain torch operations, which defines the results of all backends.

[Note: chunks]
On a CPU, memory bandwidth limits the speed. All operations therefore run on one chunk of blocks,
which fits in the cache, before the next chunk is read. On other devices chunks limit the size of
temporary tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from zero_comm.quantizer.block_format import ROTATION_SIZE, BlockFormat, seed_of_group

# 1 MiB of fp32, measured to be the fastest of 2**14 to 2**19. In smaller chunks calls dominate.
_CPU_CHUNK_NUMEL: Final = 1 << 18
_DEVICE_CHUNK_NUMEL: Final = 1 << 25  # limits each fp32 temporary tensor to 128 MiB
_SEED_STEP: Final = 0x9E3779B9  # added to the seed for each row
# With these lower limits no step is zero, and no step or reciprocal is subnormal.
_SMALLEST_MAX: Final = 2.0**-100
_SMALLEST_STEP: Final = 2.0**-107
_BFLOAT16_MAX: Final = torch.finfo(torch.bfloat16).max
# Largest bfloat16 that float16 can hold. Rounding the largest float16 to bfloat16 exceeds float16.
_FLOAT16_MAX: Final = 65280.0
# Smallest normal exponent, mantissa bits and dtype of the fp8 kinds.
_FLOAT8: Final = {"e4m3": (-6, 3, torch.float8_e4m3fn), "e5m2": (-14, 2, torch.float8_e5m2)}
_EXPONENT_BITS: Final = 0x7F800000


class TorchBackend:
    """`zero_comm.quantizer.backend.Backend` in torch operations."""

    name = "torch"

    def encode(self, x: Tensor, rows: Tensor, fmt: BlockFormat, seed: int | None) -> bool | None:
        bad, remaining = [], iter(x)
        for number, group in enumerate(in_groups(rows)):
            first = seed_of_group(seed, number)
            for index, row in enumerate(group):
                own_seed = None if first is None else (first + _SEED_STEP * index) % 2**32
                bad.append(_encode_row(next(remaining), row, fmt, own_seed))
        return any(map(bool, bad)) if x.device.type == "cpu" else None

    def decode(self, rows: Tensor, out: Tensor, fmt: BlockFormat) -> None:
        every_row = (row for group in in_groups(rows) for row in group)
        for row, values in zip(every_row, out, strict=True):
            _sum_rows(row.unsqueeze(0), values, fmt)

    def decode_sum(self, rows: Tensor, out: Tensor, fmt: BlockFormat) -> None:
        groups = in_groups(rows)
        for group, total in zip(groups, out.view(len(groups), -1), strict=True):
            _sum_rows(group, total, fmt)


def _sum_rows(rows: Tensor, out: Tensor, fmt: BlockFormat) -> None:
    """Fill 1-D ``out`` with the sum of the dequantized ``rows``, chunk by chunk."""
    numel = out.numel()
    every = [(_codes_of(row, numel, fmt), read_scales(row, numel, fmt)) for row in rows]
    for blocks in _chunks(numel, fmt, out.device):
        target = out[blocks.start * fmt.block_size : blocks.stop * fmt.block_size]
        shape = (blocks.stop - blocks.start, fmt.block_size)
        for index, (codes, scales) in enumerate(every):
            if not index and out.dtype == torch.float32 and target.numel() == math.prod(shape):
                # The first row is decoded directly into the output.
                _decode_blocks(codes[blocks], scales[blocks], target.view(shape), fmt)
                continue
            work = torch.empty(shape, dtype=torch.float32, device=out.device)
            _decode_blocks(codes[blocks], scales[blocks], work, fmt)
            values = work.view(-1)[: target.numel()]
            target.add_(values) if index else target.copy_(values)


def _encode_row(x: Tensor, row: Tensor, fmt: BlockFormat, seed: int | None) -> Tensor:
    """Quantize 1-D ``x`` into ``row``. Return a bool tensor: whether ``x`` has NaN or Inf."""
    numel = x.numel()
    codes = _codes_of(row, numel, fmt)
    dtype = torch.bfloat16 if fmt.is_symmetric else torch.float32
    scales = torch.empty(
        len(codes), fmt.scale_nbytes // dtype.itemsize, dtype=dtype, device=x.device
    )
    work: Tensor | None = None
    for blocks in _chunks(numel, fmt, x.device):
        start, stop = blocks.start * fmt.block_size, blocks.stop * fmt.block_size
        source = x[start:stop]
        if source.numel() % fmt.block_size:  # the last block alone, see `_chunks`
            source = torch.nn.functional.pad(source, (0, -source.numel() % fmt.block_size))
        source = source.view(-1, fmt.block_size)
        if work is None or len(work) < len(source):
            work = torch.empty(source.shape, dtype=torch.float32, device=x.device)
        space, found = work[: len(source)], scales[blocks]
        if source.dtype != torch.float32 or fmt.has_rotation:
            # Other dtypes are converted to fp32 once, instead of in each of several passes.
            source = space.copy_(source)
        dtype, num_valid = x.dtype, numel - start
        if fmt.has_rotation:
            source, dtype, num_valid = _rotate(space), torch.float32, fmt.block_size
        noise = None if seed is None else _uniform(seed, start, source.shape, x.device)
        if fmt.is_symmetric:
            levels = _encode_symmetric(source, found, space, fmt, dtype, noise)
        else:
            levels = _encode_asymmetric(source[:, :num_valid], source, found, fmt, dtype, noise)
        is_bad = found[:, :1].isnan()
        # Unconditional on accelerators, where bool() would make the host wait.
        if levels.device.type != "cpu" or bool(is_bad.any()):
            levels.masked_fill_(is_bad, 0)
        _pack(levels, codes[blocks], fmt)
    is_bad = scales.isnan()
    scales.masked_fill_(is_bad, float("nan"))  # the same NaN bits on all devices
    start, stop = fmt.codes_nbytes(numel), fmt.used_nbytes(numel)
    row[start:stop].copy_(scales.view(torch.uint8).view(-1))
    row[stop:].zero_()
    return is_bad.any()


def _chunks(numel: int, fmt: BlockFormat, device: torch.device) -> Iterator[slice]:
    """Yield slices of blocks, with an incomplete last block alone. See [Note: chunks]."""
    chunk_numel = _CPU_CHUNK_NUMEL if device.type == "cpu" else _DEVICE_CHUNK_NUMEL
    length = max(1, chunk_numel // fmt.block_size)
    num_whole = numel // fmt.block_size
    for start in range(0, num_whole, length):
        yield slice(start, min(start + length, num_whole))
    if numel % fmt.block_size:
        yield slice(num_whole, num_whole + 1)


def _codes_of(row: Tensor, numel: int, fmt: BlockFormat) -> Tensor:
    codes = row[: fmt.codes_nbytes(numel)].view(torch.int8)
    return codes.view(fmt.num_blocks(numel), fmt.block_nbytes)


def read_scales(row: Tensor, numel: int, fmt: BlockFormat) -> Tensor:
    """Copy the scales of a quantized row: [blocks, 1] of bf16, or [blocks, 2] of fp32."""
    # A clone, because torch refuses a wider view at an unaligned storage offset.
    data = row[fmt.codes_nbytes(numel) : fmt.used_nbytes(numel)].clone()
    if fmt.is_symmetric:
        return data.view(torch.bfloat16).view(-1, 1)
    return data.view(torch.float32).view(-1, 2)


def _decode_blocks(codes: Tensor, scales: Tensor, out: Tensor, fmt: BlockFormat) -> None:
    """Decode whole blocks into ``out``: contiguous fp32, [blocks, block size]."""
    half = fmt.block_size // 2
    if fmt.is_float:
        out.copy_(codes.view(_FLOAT8[fmt.kind][2]))
    elif not fmt.is_symmetric:
        unsigned = codes.view(torch.uint8)
        if fmt.bits == 8:
            out.copy_(unsigned)
        else:
            out[:, :half].copy_(unsigned.bitwise_and(15))
            out[:, half:].copy_(unsigned.bitwise_right_shift(4))
    elif fmt.bits == 4:
        hi = codes.add(8).bitwise_right_shift_(4)
        out[:, :half].copy_(codes.sub(hi, alpha=16))
        out[:, half:].copy_(hi)
    else:
        out.copy_(codes)
    if fmt.is_symmetric:
        out.mul_(_divide(scales.to(torch.float32), fmt.top_level))
    else:
        grid = _AsymmetricGrid(scales, fmt)
        is_zero = out == 0
        grid.values_of(out.sub_(1), out=out)
        torch.where(is_zero, grid.lo - grid.lo, out, out=out)  # zero, or NaN in a non-finite block
    if fmt.has_rotation:
        _rotate(out)


def _rotate(x: Tensor) -> Tensor:
    """Rotate contiguous groups of 64 elements in place. See [Note: rotation]."""
    x.mul_(0.125)
    source, target = x, torch.empty_like(x)
    h = 1
    while h < ROTATION_SIZE:
        a, b = source.view(-1, 2, h).unbind(1)
        sums, differences = target.view(-1, 2, h).unbind(1)
        torch.add(a, b, out=sums)
        torch.sub(a, b, out=differences)
        source, target = target, source
        h *= 2
    assert source is x, "an even number of passes ends where it began"
    return x


def _uniform(seed: int, start: int, shape: torch.Size, device: torch.device) -> Tensor:
    """Return fp32 ``u`` of [Note: stochastic rounding] for elements from index ``start``."""
    index = torch.arange(start, start + shape.numel(), dtype=torch.int64, device=device)
    mixed = _mix(torch.tensor([seed], dtype=torch.int64, device=device))
    index = _mix(index.add_(mixed).bitwise_and_(0xFFFFFFFF))
    return index.bitwise_right_shift_(8).to(torch.float32).mul_(2.0**-24).view(shape)


def _mix(x: Tensor) -> Tensor:
    """Compute ``mix`` of [Note: stochastic rounding] of int64 numbers below 2**32, in place."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x.bitwise_xor_(x >> shift).mul_(factor).bitwise_and_(0xFFFFFFFF)
    return x.bitwise_xor_(x >> 16)


def _round(x: Tensor, noise: Tensor | None) -> Tensor:
    return x.round_() if noise is None else x.add_(noise).floor_()


def _divide(x: Tensor, divisor: float) -> Tensor:
    # The divisor is a tensor because CUDA multiplies by the reciprocal of a Python number.
    return x.div_(torch.full((), divisor, dtype=x.dtype, device=x.device))


def _encode_symmetric(
    source: Tensor,
    scales: Tensor,
    work: Tensor,
    fmt: BlockFormat,
    dtype: torch.dtype,
    noise: Tensor | None,
) -> Tensor:
    """Fill ``scales``, and return the levels in ``work``."""
    # On CPUs amax and amin are far faster than aminmax, and up to 3 times as fast as abs and amax.
    largest = source.amax(1, keepdim=True)
    largest = torch.maximum(largest, source.amin(1, keepdim=True).neg_(), out=largest)
    poison = largest - largest  # 0, or NaN if the block holds NaN or Inf
    ceiling = _FLOAT16_MAX if dtype == torch.float16 else _BFLOAT16_MAX
    largest.clamp_(_SMALLEST_MAX, ceiling).add_(poison)
    scales.copy_(largest)
    # Decoding repeats these operations on the rounded maximum, so both use the same grid.
    steps = _divide(largest.copy_(scales), fmt.top_level)
    torch.mul(source, steps.reciprocal_(), out=work)
    if fmt.is_float:
        return _round_to_float8(work, fmt, noise)
    _round(work, noise)
    return work if noise is None else work.clamp_(-fmt.top_level, fmt.top_level)


def _round_to_float8(v: Tensor, fmt: BlockFormat, noise: Tensor | None) -> Tensor:
    smallest_exponent, mantissa_bits, _ = _FLOAT8[fmt.kind]
    v.clamp_(-fmt.top_level, fmt.top_level)
    unit = v.view(torch.int32).bitwise_and(_EXPONENT_BITS).view(torch.float32)
    unit.clamp_(min=2.0**smallest_exponent).mul_(2.0**-mantissa_bits)
    if noise is None:
        v.div_(unit).round_().mul_(unit)
    else:
        magnitude = _round(v.abs().div_(unit), noise).mul_(unit)
        torch.copysign(magnitude.clamp_(max=fmt.top_level), v, out=v)
    return v.add_(0.0)  # turns -0 into +0


def _encode_asymmetric(
    valid: Tensor,
    source: Tensor,
    scales: Tensor,
    fmt: BlockFormat,
    dtype: torch.dtype,
    noise: Tensor | None,
) -> Tensor:
    """Fill ``scales`` from the ``valid`` columns, and return fp32 codes of all columns."""
    torch.amin(valid, 1, keepdim=True, out=scales[:, :1])
    torch.amax(valid, 1, keepdim=True, out=scales[:, 1:])
    # A non-finite block gets two NaN. Adding zero turns -0 into +0 in other blocks.
    scales.add_((scales - scales).sum(1, keepdim=True))
    grid = _AsymmetricGrid(scales, fmt)
    k = (source * 0.5).sub_(grid.lo * 0.5).mul_(grid.step.reciprocal().mul_(2.0))
    _round(k, noise).clamp_(0, fmt.top_index)
    if noise is None and not fmt.has_rotation:
        # Use a neighbour of k that decodes to exactly ``source`` if k does not.
        is_wrong = grid.values_of(k).to(dtype) != source
        for neighbour in ((k + 1).clamp_(max=fmt.top_index), (k - 1).clamp_(min=0)):
            is_exact = grid.values_of(neighbour).to(dtype) == source
            k = torch.where(is_wrong & is_exact, neighbour, k)
    return k.add_(1).masked_fill_(source == 0, 0)


class _AsymmetricGrid:
    """Grids of asymmetric blocks. ``lo``, ``hi`` and ``step`` are [blocks, 1]."""

    def __init__(self, scales: Tensor, fmt: BlockFormat) -> None:
        self._top_index = fmt.top_index
        self.lo, self.hi = scales[:, :1], scales[:, 1:]
        half_range = (self.hi * 0.5).sub_(self.lo * 0.5)
        self.step = _divide(half_range, fmt.top_index / 2).clamp_(min=_SMALLEST_STEP)

    def values_of(self, k: Tensor, out: Tensor | None = None) -> Tensor:
        is_bottom, is_top = k == 0, k == self._top_index
        values = torch.mul(k, self.step * 0.5, out=out).add_(self.lo * 0.5).mul_(2.0)
        torch.where(is_bottom, self.lo, values, out=values)
        return torch.where(is_top, self.hi, values, out=values)


def _pack(levels: Tensor, codes: Tensor, fmt: BlockFormat) -> None:
    if fmt.is_float:
        codes.copy_(levels.to(_FLOAT8[fmt.kind][2]).view(torch.int8))
        return
    if fmt.bits == 4:
        half = fmt.block_size // 2
        levels = levels[:, :half].add_(levels[:, half:], alpha=16)
    if fmt.is_symmetric:
        codes.copy_(levels)  # torch vectorizes the conversion to int8, not to uint8
    else:
        codes.view(torch.uint8).copy_(levels)


def in_groups(rows: Tensor) -> Tensor:
    """View ``rows`` as [groups, rows per group, bytes]."""
    return rows if rows.dim() == 3 else rows.unsqueeze(0)


BACKEND: Final = TorchBackend()
