"""Backend in plain torch operations, which runs on every device and defines the others' results.

[Note: chunks]
On a CPU the work is bound by memory, so each pass over a chunk must find it in cache: every
operation runs on one chunk of blocks before the next chunk is read, in a workspace that is
allocated once per row. On other devices chunks bound the size of the workspace.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from zero_comm.quantizer.block_codes import decode_blocks, encode_blocks, in_groups, uniform
from zero_comm.quantizer.block_format import BlockFormat, seed_of_group

# 1 MiB of fp32: the best of 2**14 to 2**19 when measured; below it, the cost of a call shows.
_CPU_CHUNK_NUMEL: Final = 1 << 18
_DEVICE_CHUNK_NUMEL: Final = 1 << 25  # bounds the workspace to 128 MiB
_SEED_STEP: Final = 0x9E3779B9  # between the seeds of two rows


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
        remaining = iter(out)
        for group in in_groups(rows):
            for row in group:
                _sum_rows(row.unsqueeze(0), next(remaining), fmt)

    def decode_sum(self, rows: Tensor, out: Tensor, fmt: BlockFormat) -> None:
        groups = in_groups(rows)
        for group, total in zip(groups, out.view(len(groups), -1), strict=True):
            _sum_rows(group, total, fmt)


def _sum_rows(rows: Tensor, out: Tensor, fmt: BlockFormat) -> None:
    """Fill 1-D ``out`` with the sum of ``rows``, chunk by chunk."""
    scales = [read_scales(row, out.numel(), fmt) for row in rows]
    for chunk in _chunks(out.numel(), fmt, out.device):
        for index, row in enumerate(rows):
            _decode_chunk(row, scales[index], chunk, out, fmt, is_added=index > 0)


def _encode_row(x: Tensor, row: Tensor, fmt: BlockFormat, seed: int | None) -> Tensor:
    """Quantize 1-D ``x``. Returns a bool tensor on its device: whether it has NaN or Inf."""
    numel = x.numel()
    codes = _codes_of(row, numel, fmt)
    dtype = torch.bfloat16 if fmt.is_symmetric else torch.float32
    scales = torch.empty(
        len(codes), fmt.scale_nbytes // dtype.itemsize, dtype=dtype, device=x.device
    )
    work: Tensor | None = None
    for blocks in _chunks(numel, fmt, x.device):
        start, stop = blocks.start * fmt.block_size, blocks.stop * fmt.block_size
        values, num_valid = _whole_blocks(x[start:stop], fmt)
        if work is None or len(work) < len(values):
            work = torch.empty(values.shape, dtype=torch.float32, device=x.device)
        space = work[: len(values)]
        encode_blocks(
            # 16-bit and fp64 input becomes fp32 once, and not in each of several passes.
            values if values.dtype == torch.float32 else space.copy_(values),
            codes[blocks],
            scales[blocks],
            space,
            fmt,
            dtype=x.dtype,
            num_valid=num_valid,
            noise=None if seed is None else uniform(seed, start, values.shape, x.device),
        )
    is_bad = scales.isnan()
    scales.masked_fill_(is_bad, float("nan"))  # one bit pattern, whatever the device made
    start, stop = fmt.codes_nbytes(numel), fmt.used_nbytes(numel)
    row[start:stop].copy_(scales.view(torch.uint8).view(-1))
    row[stop:].zero_()
    return is_bad.any()


def _whole_blocks(x: Tensor, fmt: BlockFormat) -> tuple[Tensor, int]:
    """Return ``x`` as blocks padded with zeros, and the number of columns without padding."""
    if x.numel() % fmt.block_size == 0:
        return x.view(-1, fmt.block_size), fmt.block_size
    assert x.numel() < fmt.block_size, "the block that isn't whole is a chunk of its own"
    padded = x.new_zeros(1, fmt.block_size)
    padded[0, : x.numel()] = x
    return padded, x.numel()


def _decode_chunk(
    row: Tensor, scales: Tensor, blocks: slice, out: Tensor, fmt: BlockFormat, *, is_added: bool
) -> None:
    """Write the values of ``blocks`` to their part of ``out``, or add them to it."""
    codes = _codes_of(row, out.numel(), fmt)[blocks]
    target = out[blocks.start * fmt.block_size : blocks.stop * fmt.block_size]
    shape = (len(codes), fmt.block_size)
    is_whole = target.numel() % fmt.block_size == 0
    if is_whole and out.dtype == torch.float32 and not is_added:
        decode_blocks(codes, scales[blocks], target.view(shape), fmt)  # the output is workspace
        return
    work = torch.empty(shape, dtype=torch.float32, device=out.device)
    decode_blocks(codes, scales[blocks], work, fmt)
    values = work.view(-1)[: target.numel()]
    if is_added:
        target.add_(values)
    else:
        target.copy_(values)


def _chunks(numel: int, fmt: BlockFormat, device: torch.device) -> Iterator[slice]:
    """Split blocks into slices, with a padded last block on its own. See [Note: chunks]."""
    chunk_numel = _CPU_CHUNK_NUMEL if device.type == "cpu" else _DEVICE_CHUNK_NUMEL
    length = max(1, chunk_numel // fmt.block_size)
    num_whole = numel // fmt.block_size
    for start in range(0, num_whole, length):
        yield slice(start, min(start + length, num_whole))
    if numel % fmt.block_size:
        yield slice(num_whole, num_whole + 1)


def _codes_of(row: Tensor, numel: int, fmt: BlockFormat) -> Tensor:
    """View the codes of a quantized row as int8, one row per block."""
    codes = row[: fmt.codes_nbytes(numel)].view(torch.int8)
    return codes.view(fmt.num_blocks(numel), fmt.block_nbytes)


def read_scales(row: Tensor, numel: int, fmt: BlockFormat) -> Tensor:
    """Copy the scales of a quantized row: one bf16 per block, or two fp32."""
    # Copied: a view as a wider type wants an aligned offset from the storage's start.
    data = row[fmt.codes_nbytes(numel) : fmt.used_nbytes(numel)].clone()
    if fmt.is_symmetric:
        return data.view(torch.bfloat16).view(-1, 1)
    return data.view(torch.float32).view(-1, 2)


BACKEND: Final = TorchBackend()
