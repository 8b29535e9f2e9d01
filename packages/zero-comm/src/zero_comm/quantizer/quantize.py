"""Quantization of flat floating-point tensors to bytes and back, with checked arguments.

[Note: the quantized buffer] in `block_format` defines block, scale, step, code and the bytes.
Block-wise scales make 8-bit weights accurate enough for training: ZeRO++ (arXiv 2306.10209), qwZ.

[Note: non-finite values]
NaN and Inf are never clipped to finite values. With "carry" a block that holds NaN or Inf
dequantizes to NaN everywhere, because the block's scale is NaN. This needs no extra pass and no
host synchronization. "refuse" raises an error instead and waits for the device.

[Note: rows]
Messages to several ranks are rows of one byte matrix, with space between the rows for message
headers. One call quantizes all rows, which saves launches. If a rank receives one message for each
of several nodes, rows are in groups: one group per node.
"""

from __future__ import annotations

import math
from typing import Final, Literal

import torch
from torch import Tensor

from zero_comm.quantizer.backend import find_backend
from zero_comm.quantizer.block_format import ALIGNMENT, BlockFormat
from zero_comm.quantizer.torch_backend import read_scales

QUANTIZABLE_DTYPES: Final = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})


def quantize(
    x: Tensor,
    format: str | BlockFormat = "int8",
    *,
    seed: int | None = None,
    nonfinite: Literal["carry", "refuse"] = "carry",
    out: Tensor | None = None,
) -> Tensor:
    """Quantize a tensor block by block into one flat buffer of bytes, and return the buffer.

    In every finite block ``|x - dequantize(quantize(x))|`` is at most half a step (fp8: half the
    local spacing of fp8 numbers), plus the rounding of fp32 and of the output dtype. Zeros stay
    zeros. Without a seed, dequantized tensors can be quantized again in the same dtype unchanged.
    With a rotation the last two statements do not hold, and the bound is one of the root mean
    square error of 64 elements. With a seed the error is below one step and zero on average. Blocks
    do not affect each other. [Note: the quantized buffer] defines the bytes. Papers: ZeRO++ (arXiv
    2306.10209), qwZ; SDP4Bit (arXiv 2410.15526) for the rotation.

    Args:
        x: any shape, fp32, bf16, fp16 or fp64, read in flat order. Not differentiable. Values of
            fp64, or of a rotated block, that exceed fp32's range count as Inf.
        format: "int8", "int4", "e4m3", "e5m2" or a `BlockFormat`.
        seed: selects stochastic rounding. A seed gives the same bytes on every device. Only the low
            32 bits count. See [Note: stochastic rounding].
        nonfinite: treatment of NaN and Inf. "carry" turns their block into NaN without a host
            synchronization. "refuse" raises ValueError.
        out: buffer for the bytes: uint8, 1-D, contiguous, `quantized_nbytes` long, on the device of
            ``x``, not overlapping ``x``. None allocates one.

    Raises:
        ValueError: an argument does not fit, or ``nonfinite="refuse"`` found NaN or Inf.
    """
    fmt = BlockFormat.make(format)
    check_float("x", x.dtype)
    if nonfinite not in ("carry", "refuse"):
        raise ValueError(f"nonfinite must be 'carry' or 'refuse', got {nonfinite!r}")
    x = x.detach().resolve_neg().reshape(-1).contiguous()
    nbytes = fmt.nbytes(x.numel())
    if out is None:
        out = torch.empty(nbytes, dtype=torch.uint8, device=x.device)
    _check_flat("out", out, nbytes, torch.uint8, x.device)

    row = out if _is_aligned(out) else torch.empty_like(out)
    with torch.no_grad():
        is_bad = quantize_rows(x, fmt, row.view(1, -1), seed=seed)
        if nonfinite == "refuse" and is_bad is not False:
            bad = read_scales(row, x.numel(), fmt)[:, 0].isnan().nonzero().view(-1)
            if len(bad):
                start = int(bad[0]) * fmt.block_size
                raise ValueError(
                    f"x has NaN or Inf in {len(bad)} of {fmt.num_blocks(x.numel())} blocks, the "
                    f"first among elements [{start}, {start + fmt.block_size}); pass "
                    "nonfinite='carry' to let them through"
                )
        if row is not out:
            out.copy_(row)
    return out


def dequantize(
    buffer: Tensor,
    numel: int,
    format: str | BlockFormat = "int8",
    *,
    dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
) -> Tensor:
    """Dequantize the bytes from `quantize` into a flat tensor, and return the tensor.

    Args:
        buffer: uint8, 1-D, contiguous, ``quantized_nbytes(numel, format)`` long.
        numel: number of quantized elements.
        format: the format passed to `quantize`.
        dtype: fp32, bf16, fp16 or fp64. A dtype narrower than the quantized one may overflow to
            Inf. After a rotation the same dtype may overflow too, near its largest value.
        out: 1-D, contiguous, ``numel`` elements of ``dtype``, on the device of ``buffer``, not
            overlapping ``buffer``. None allocates one.

    Raises:
        ValueError: an argument does not fit.
    """
    fmt = BlockFormat.make(format)
    check_float("dtype", dtype)
    if (length := fmt.nbytes(numel)) != (found := buffer.numel()):
        raise ValueError(f"buffer must have {length} elements for numel = {numel}, got {found}")
    _check_flat("buffer", buffer, length, torch.uint8, buffer.device)
    if out is None:
        out = torch.empty(numel, dtype=dtype, device=buffer.device)
    _check_flat("out", out, numel, dtype, buffer.device)
    row = buffer if _is_aligned(buffer) else buffer.clone()
    dequantize_rows(row.view(1, -1), numel, fmt, out)
    return out


def quantize_rows(
    x: Tensor, format: str | BlockFormat, out: Tensor, *, seed: int | None = None
) -> bool | None:
    """Quantize equal parts of a flat tensor, each into its own row.

    Row ``r`` gets the bytes of `quantize` for part ``r``, with seed ``seed + 0x9e3779b9 * r`` if
    there is one. NaN and Inf are carried. Rows may be in groups, [groups, rows per group, bytes],
    with different strides between groups and rows. The parts of a group are adjacent in ``x``, and
    the group's seed is ``seed + 0x9e3779b1 * group``. Return whether ``x`` has NaN or Inf, or None
    if finding out would make the host wait for a device.

    Args:
        x: flat, contiguous, fp32, bf16, fp16 or fp64, n elements for each row of ``out``.
        format: "int8", "int4", "e4m3", "e5m2" or a `BlockFormat`.
        out: uint8, ``quantized_nbytes(n, format)`` columns, on the device of ``x``, not overlapping
            ``x``. Rows are contiguous and start at multiples of 16 bytes. Bytes between rows stay
            unchanged.
        seed: see `quantize`.

    Raises:
        ValueError: an argument does not fit.
    """
    fmt = BlockFormat.make(format)
    check_float("x", x.dtype)
    if out.dim() not in (2, 3):
        raise ValueError(f"out must have rows, got shape {tuple(out.shape)}")
    if x.dim() != 1 or not x.is_contiguous():
        raise ValueError(f"x must be 1-D and contiguous, got shape {tuple(x.shape)}")
    num_rows = math.prod(out.shape[:-1])
    numel, rest = divmod(x.numel(), max(num_rows, 1))
    if rest or (numel and not num_rows):
        raise ValueError(f"x must be {num_rows} equal parts, got {x.numel()} elements")
    _check_rows("out", out, fmt.nbytes(numel), x.device)
    with torch.no_grad():
        values = x.detach().resolve_neg().view(num_rows, numel)
        seed = None if seed is None else int(seed) % 2**32
        return find_backend(x.device).encode(values, out, fmt, seed)


def dequantize_rows(rows: Tensor, numel: int, format: str | BlockFormat, out: Tensor) -> None:
    """Dequantize the rows from `quantize_rows` into a flat tensor.

    Args:
        rows: the rows as `quantize_rows` wrote them in ``format``.
        numel: elements per row.
        format: the format passed to `quantize_rows`.
        out: flat, contiguous, fp32, bf16, fp16 or fp64, on the device of ``rows``, not overlapping
            ``rows``. Receives the values of row after row.

    Raises:
        ValueError: an argument does not fit.
    """
    fmt = BlockFormat.make(format)
    _check_rows("rows", rows, fmt.nbytes(numel), out.device)
    check_float("out", out.dtype)
    num_rows = math.prod(rows.shape[:-1])
    _check_flat("out", out, num_rows * numel, out.dtype, rows.device)
    with torch.no_grad():
        find_backend(out.device).decode(rows, out.detach().view(num_rows, numel), fmt)


def dequantize_sum(rows: Tensor, numel: int, format: str | BlockFormat, out: Tensor) -> None:
    """Sum the dequantized rows of each group in fp32, in row order.

    Arguments and errors are those of `dequantize_rows`, with at least one row per group. ``out`` is
    fp32 and receives the sum of each group, in group order.
    """
    fmt = BlockFormat.make(format)
    _check_rows("rows", rows, fmt.nbytes(numel), out.device)
    if not rows.shape[-2]:
        raise ValueError("rows must be one at least, got none")
    num_groups = len(rows) if rows.dim() == 3 else 1
    _check_flat("out", out, num_groups * numel, torch.float32, rows.device)
    with torch.no_grad():
        find_backend(out.device).decode_sum(rows, out.detach(), fmt)


def check_float(name: str, dtype: torch.dtype) -> None:
    """Raise ValueError, about argument ``name``, if ``dtype`` cannot be quantized."""
    if dtype not in QUANTIZABLE_DTYPES:
        raise ValueError(f"{name} must be fp32, bf16, fp16 or fp64, got {dtype}")


def _check_rows(name: str, rows: Tensor, nbytes: int, device: torch.device) -> None:
    if rows.dtype != torch.uint8:
        raise ValueError(f"{name} must be uint8, got {rows.dtype}")
    if rows.dim() not in (2, 3) or rows.shape[-1] != nbytes:
        raise ValueError(f"{name} must have rows of {nbytes} bytes, got shape {tuple(rows.shape)}")
    if rows.device != device:
        raise ValueError(f"{name} must be on {device}, got {rows.device}")
    if not rows.numel():
        return
    sizes, strides = rows.shape[:-1], rows.stride()[:-1]
    used = [stride for size, stride in zip(sizes, strides, strict=True) if size > 1]
    is_aligned = _is_aligned(rows) and all(stride % ALIGNMENT == 0 for stride in used)
    if rows.stride(-1) != 1 or not is_aligned or any(stride < nbytes for stride in used):
        raise ValueError(
            f"{name} must have contiguous rows that start at multiples of {ALIGNMENT} bytes, got "
            f"strides {rows.stride()} from address {rows.data_ptr():#x}"
        )


def _is_aligned(buffer: Tensor) -> bool:
    return buffer.data_ptr() % ALIGNMENT == 0


def _check_flat(
    name: str, tensor: Tensor, numel: int, dtype: torch.dtype, device: torch.device
) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"{name} must be 1-D and contiguous, got shape {tuple(tensor.shape)}")
    if tensor.is_neg():
        raise ValueError(f"{name} must not be a lazily negated view; pass {name}.resolve_neg()")
    if tensor.numel() != numel:
        raise ValueError(f"{name} must have {numel} elements, got {tensor.numel()}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
