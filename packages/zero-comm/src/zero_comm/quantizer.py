"""The block quantizer in plain torch operations: flat floats to bytes and back.

Terms (block, maximum, step, code) are those of [Note: the quantized buffer] in `block_format`.
Block-wise scales are what makes 8-bit weights accurate enough to train with: ZeRO++ (arXiv
2306.10209), section on quantized weight communication (qwZ).

[Note: chunks]
On a CPU the work is bound by memory, so each pass over a chunk must find it in cache: every
operation below runs on one chunk of blocks before the next chunk is read, into a workspace that
is allocated once a call. Two reductions (max, min) are several times faster than one `aminmax` or
`abs`, and codes are cast through int8, never uint8, whose conversion torch doesn't vectorize.

[Note: non-finite values]
NaN and Inf are never clipped to a finite value. "carry" gives every element of a block that holds
one back as NaN: the block's maximum is then NaN, at no further pass over the data and without a
host synchronization. "refuse" raises instead, and has to wait for the device to know.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import torch
from torch import Tensor

from zero_comm.block_format import BlockFormat

__all__ = ["QUANTIZABLE_DTYPES", "dequantize", "quantize"]

QUANTIZABLE_DTYPES: Final = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})

# Maxima are kept within [_SMALLEST_MAX, the top of bfloat16]: above zero, so that a block of zeros
# needs no special case, and far enough from the ends that no step or reciprocal is subnormal.
_SMALLEST_MAX: Final = 2.0**-100
# The largest bfloat16 that the input's dtype can hold: 65504 would round up to Inf in float16.
_LARGEST_MAX: Final = {
    torch.float32: torch.finfo(torch.bfloat16).max,
    torch.bfloat16: torch.finfo(torch.bfloat16).max,
    torch.float16: 65280.0,
    torch.float64: torch.finfo(torch.bfloat16).max,
}
# 1 MiB of fp32: the best of 2**14 to 2**19 when measured; below it, the cost of a call shows.
_CPU_CHUNK_NUMEL: Final = 1 << 18
_DEVICE_CHUNK_NUMEL: Final = 1 << 25  # bounds the workspace to 128 MiB


def quantize(
    x: Tensor,
    *,
    bits: int = 8,
    block_size: int | None = None,
    nonfinite: Literal["carry", "refuse"] = "carry",
    out: Tensor | None = None,
) -> Tensor:
    """Quantize a tensor block by block into one flat buffer of bytes.

    For every finite block, ``|x - dequantize(quantize(x))|`` is at most half a step, besides the
    rounding of fp32 and of the dtype dequantized to; zeros come back as zeros; and what came back
    once comes back unchanged when it is quantized again in the same dtype. Blocks don't affect
    each other. See [Note: the quantized buffer] for the bytes; ZeRO++ (arXiv 2306.10209), qwZ.

    Args:
        x: any shape, fp32, bf16, fp16 or fp64; read in flat order. Not differentiable. An fp64
            value out of fp32's range counts as Inf.
        bits: 8 or 4.
        block_size: elements per block, a multiple of 8; None for ``DEFAULT_BLOCK_SIZE[bits]``.
        nonfinite: what NaN and Inf do: "carry" turns their whole block into NaN, without a host
            synchronization; "refuse" raises ValueError.
        out: receives the bytes: uint8, 1-D, contiguous, `quantized_nbytes` long, on the device of
            ``x`` and not overlapping it. Allocated when None.

    Returns:
        ``out``.

    Raises:
        ValueError: an argument that doesn't fit, by name, or a non-finite value to refuse.
    """
    fmt = BlockFormat.make(bits, block_size)
    if x.dtype not in QUANTIZABLE_DTYPES:
        raise ValueError(f"x must be fp32, bf16, fp16 or fp64, got {x.dtype}")
    if nonfinite not in ("carry", "refuse"):
        raise ValueError(f"nonfinite must be 'carry' or 'refuse', got {nonfinite!r}")
    x = x.detach().reshape(-1)
    numel = x.numel()
    if out is None:
        out = torch.empty(fmt.nbytes(numel), dtype=torch.uint8, device=x.device)
    _check_buffer("out", out, fmt.nbytes(numel), device=x.device)

    maxima = torch.empty(fmt.num_blocks(numel), 1, dtype=torch.bfloat16, device=x.device)
    _encode(x, _codes_of(out, numel, fmt), maxima, fmt)
    if nonfinite == "refuse" and not bool(maxima.isfinite().all()):
        raise ValueError(_describe_nonfinite(maxima, fmt))
    start, stop = fmt.codes_nbytes(numel), fmt.used_nbytes(numel)
    out[start:stop].copy_(maxima.view(torch.uint8).view(-1))
    out[stop:].zero_()
    return out


def dequantize(
    buffer: Tensor,
    numel: int,
    *,
    dtype: torch.dtype = torch.float32,
    bits: int = 8,
    block_size: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Turn the bytes that `quantize` made back into a flat tensor.

    Args:
        buffer: uint8, 1-D, contiguous, ``quantized_nbytes(numel, ...)`` long.
        numel: elements that were quantized.
        dtype: fp32, bf16, fp16 or fp64; the one that was quantized, or a wider one (a narrower one
            may overflow to Inf, as any cast may).
        bits: as given to `quantize`.
        block_size: as given to `quantize`.
        out: receives the values: 1-D, contiguous, ``numel`` elements of ``dtype``, on the device
            of ``buffer`` and not overlapping it. Allocated when None.

    Returns:
        ``out``, 1-D.

    Raises:
        ValueError: an argument that doesn't fit, by name.
    """
    fmt = BlockFormat.make(bits, block_size)
    if dtype not in QUANTIZABLE_DTYPES:
        raise ValueError(f"dtype must be fp32, bf16, fp16 or fp64, got {dtype}")
    _check_buffer("buffer", buffer, fmt.nbytes(numel))
    if out is None:
        out = torch.empty(numel, dtype=dtype, device=buffer.device)
    _check_values(out, numel, dtype, device=buffer.device)

    # Copied first: bytes may start at an odd address, where they can't be viewed as bfloat16.
    maxima = buffer[fmt.codes_nbytes(numel) : fmt.used_nbytes(numel)].clone()
    steps = maxima.view(torch.bfloat16).view(-1, 1).to(torch.float32).div_(fmt.top_level)
    _decode(_codes_of(buffer, numel, fmt), steps, out.detach(), fmt)
    return out


def _encode(x: Tensor, codes: Tensor, maxima: Tensor, fmt: BlockFormat) -> None:
    """Fill ``codes`` and ``maxima``, one row a block, from flat ``x``."""
    num_whole, num_rest = divmod(x.numel(), fmt.block_size)
    blocks = x[: num_whole * fmt.block_size].view(num_whole, fmt.block_size)
    workspace: Tensor | None = None
    for rows in _chunks(num_whole, fmt, x.device):
        if workspace is None:
            workspace = _workspace(rows.stop, fmt, x.device)
        _encode_chunk(blocks[rows], codes[rows], maxima[rows], workspace, fmt)
    if num_rest:
        last = x.new_zeros(1, fmt.block_size)
        last[0, :num_rest] = x[-num_rest:]
        workspace = _workspace(1, fmt, x.device)
        _encode_chunk(last, codes[num_whole:], maxima[num_whole:], workspace, fmt)


def _encode_chunk(
    x: Tensor, codes: Tensor, maxima: Tensor, workspace: Tensor, fmt: BlockFormat
) -> None:
    """Encode whole blocks: ``x``, ``codes`` and ``maxima`` have one row a block."""
    work = workspace[: len(x)]
    # 16-bit and fp64 input is widened or narrowed to fp32 once, and not in each of three passes.
    source = x if x.dtype == torch.float32 else work.copy_(x)
    largest = source.amax(1, keepdim=True)
    largest = torch.maximum(largest, source.amin(1, keepdim=True).neg_(), out=largest)
    poison = largest - largest  # 0, or NaN where the block holds NaN or Inf
    largest.clamp_(_SMALLEST_MAX, _LARGEST_MAX[x.dtype]).add_(poison)
    maxima.copy_(largest)
    # From the rounded maximum, by the same operations as in `dequantize`: one grid for both.
    steps = largest.copy_(maxima).div_(fmt.top_level)
    torch.mul(source, steps.reciprocal_(), out=work).round_()
    if fmt.bits == 4:
        half = fmt.block_size // 2
        codes.copy_(work[:, :half].add_(work[:, half:], alpha=16))
    else:
        codes.copy_(work)


def _decode(codes: Tensor, steps: Tensor, out: Tensor, fmt: BlockFormat) -> None:
    """Fill flat ``out`` from ``codes`` and fp32 ``steps``, one row a block."""
    num_whole, num_rest = divmod(out.numel(), fmt.block_size)
    blocks = out[: num_whole * fmt.block_size].view(num_whole, fmt.block_size)
    workspace: Tensor | None = None
    for rows in _chunks(num_whole, fmt, out.device):
        if out.dtype == torch.float32:  # no workspace: the output is one
            _decode_chunk(codes[rows], steps[rows], blocks[rows], fmt)
            continue
        if workspace is None:
            workspace = _workspace(rows.stop, fmt, out.device)
        work = workspace[: rows.stop - rows.start]
        _decode_chunk(codes[rows], steps[rows], work, fmt)
        blocks[rows].copy_(work)
    if num_rest:
        last = _workspace(1, fmt, out.device)
        _decode_chunk(codes[num_whole:], steps[num_whole:], last, fmt)
        out[-num_rest:].copy_(last[0, :num_rest])


def _decode_chunk(codes: Tensor, steps: Tensor, out: Tensor, fmt: BlockFormat) -> None:
    """Decode whole blocks into fp32 ``out``, one row a block."""
    if fmt.bits == 4:
        half = fmt.block_size // 2
        hi = codes.add(8).bitwise_right_shift_(4)
        out[:, :half].copy_(codes.sub(hi, alpha=16))
        out[:, half:].copy_(hi)
    else:
        out.copy_(codes)
    out.mul_(steps)


def _chunks(num_blocks: int, fmt: BlockFormat, device: torch.device) -> Iterator[slice]:
    """Cut whole blocks into slices of rows; the first is the longest. See [Note: chunks]."""
    numel = _CPU_CHUNK_NUMEL if device.type == "cpu" else _DEVICE_CHUNK_NUMEL
    length = max(1, numel // fmt.block_size)
    for start in range(0, num_blocks, length):
        yield slice(start, min(start + length, num_blocks))


def _workspace(num_blocks: int, fmt: BlockFormat, device: torch.device) -> Tensor:
    return torch.empty(num_blocks, fmt.block_size, dtype=torch.float32, device=device)


def _codes_of(buffer: Tensor, numel: int, fmt: BlockFormat) -> Tensor:
    """View the codes of ``buffer`` as int8, one row a block."""
    codes = buffer[: fmt.codes_nbytes(numel)].view(torch.int8)
    return codes.view(fmt.num_blocks(numel), fmt.block_nbytes)


def _check_buffer(
    name: str, buffer: Tensor, nbytes: int, *, device: torch.device | None = None
) -> None:
    if buffer.dtype != torch.uint8:
        raise ValueError(f"{name} must be uint8, got {buffer.dtype}")
    if buffer.dim() != 1 or not buffer.is_contiguous():
        raise ValueError(f"{name} must be 1-D and contiguous, got shape {tuple(buffer.shape)}")
    if buffer.numel() != nbytes:
        raise ValueError(f"{name} must have {nbytes} bytes, got {buffer.numel()}")
    if device is not None and buffer.device != device:
        raise ValueError(f"{name} must be on {device}, got {buffer.device}")


def _check_values(out: Tensor, numel: int, dtype: torch.dtype, *, device: torch.device) -> None:
    if out.dtype != dtype:
        raise ValueError(f"out must be {dtype}, got {out.dtype}")
    if out.dim() != 1 or not out.is_contiguous():
        raise ValueError(f"out must be 1-D and contiguous, got shape {tuple(out.shape)}")
    if out.numel() != numel:
        raise ValueError(f"out must have {numel} elements, got {out.numel()}")
    if out.device != device:
        raise ValueError(f"out must be on {device}, got {out.device}")


def _describe_nonfinite(maxima: Tensor, fmt: BlockFormat) -> str:
    bad = (~maxima.isfinite()).view(-1).nonzero().view(-1)
    start = int(bad[0]) * fmt.block_size
    return (
        f"x has NaN or Inf in {len(bad)} of {len(maxima)} blocks, the first among elements "
        f"[{start}, {start + fmt.block_size}); pass nonfinite='carry' to let them through"
    )
