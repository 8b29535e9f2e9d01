"""Quantization of flat floating-point tensors to bytes and back, with checked arguments.

Terms (block, scale, step, code) and the bytes are those of [Note: the quantized buffer] in
`block_format`. Block-wise scales are what makes 8-bit weights accurate enough to train with:
ZeRO++ (arXiv 2306.10209), section on quantized weight communication (qwZ).

[Note: non-finite values]
NaN and Inf are never clipped to a finite value. With "carry", every element of a block that holds
one is dequantized to NaN: the block's scale is NaN, which takes neither a further pass over the
data nor a host synchronization. "refuse" raises instead, and has to wait for the device.

[Note: rows]
Messages to several ranks are rows of one matrix of bytes, with room between them for headers.
They are quantized in one call: one launch for each would cost more than small ones take. Where a
rank gets a message for each of several nodes, rows are in groups: those of a node are as far apart
as the messages to one rank are long.
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
    """Quantize a tensor block by block into one flat buffer of bytes.

    For every finite block, ``|x - dequantize(quantize(x))|`` is at most half a step (fp8: half the
    spacing of fp8 numbers there, times the step), besides the rounding of fp32 and of the dtype
    dequantized to; zeros come back as zeros; and what came back once comes back unchanged when it
    is quantized again in the same dtype. A rotation bounds the error of 64 elements together
    instead, by the root of the sum of squares of theirs; with a seed, the error is below a step and
    zero on average. Blocks don't affect each other. See [Note: the quantized buffer] for the bytes;
    ZeRO++ (arXiv 2306.10209), qwZ; for the rotation SDP4Bit (arXiv 2410.15526).

    Args:
        x: any shape, fp32, bf16, fp16 or fp64; read in flat order. Not differentiable. An fp64
            value out of fp32's range counts as Inf; so does, with a rotation, a sum of 64 that is.
        format: "int8", "int4", "e4m3", "e5m2" or a `BlockFormat`.
        seed: makes rounding stochastic, see [Note: stochastic rounding]; the same seed gives the
            same bytes everywhere. Of an int, the low 32 bits count.
        nonfinite: what NaN and Inf do: "carry" turns their whole block into NaN, without a host
            synchronization; "refuse" raises ValueError.
        out: receives the bytes: uint8, 1-D, contiguous, `quantized_nbytes` long, on the device of
            ``x`` and not overlapping it. Allocated when None.

    Returns:
        ``out``.

    Raises:
        ValueError: an argument that doesn't fit, by name, or a non-finite value to refuse.
    """
    fmt = BlockFormat.make(format)
    check_float("x", x.dtype)
    if nonfinite not in ("carry", "refuse"):
        raise ValueError(f"nonfinite must be 'carry' or 'refuse', got {nonfinite!r}")
    x = x.detach().reshape(1, -1)
    nbytes = fmt.nbytes(x.numel())
    if out is None:
        out = torch.empty(nbytes, dtype=torch.uint8, device=x.device)
    _check_flat("out", out, nbytes, torch.uint8, x.device)

    row = out if _is_aligned(out) else torch.empty_like(out)
    with torch.no_grad():
        is_bad = find_backend(x.device).encode(x, row.view(1, -1), fmt, _check_seed(seed))
        if nonfinite == "refuse" and is_bad is not False:
            _refuse_nonfinite(row, x.numel(), fmt)
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
    """Dequantize the bytes that `quantize` made into a flat tensor.

    Args:
        buffer: uint8, 1-D, contiguous, ``quantized_nbytes(numel, format)`` long.
        numel: elements that were quantized.
        format: as given to `quantize`.
        dtype: fp32, bf16, fp16 or fp64; the one that was quantized, or a wider one (a narrower one
            may overflow to Inf, as any cast may; after a rotation so may the same one, if values
            were within an error of its largest).
        out: receives the values: 1-D, contiguous, ``numel`` elements of ``dtype``, on the device
            of ``buffer`` and not overlapping it. Allocated when None.

    Returns:
        ``out``, 1-D.

    Raises:
        ValueError: an argument that doesn't fit, by name.
    """
    fmt = BlockFormat.make(format)
    check_float("dtype", dtype)
    _check_flat("buffer", buffer, fmt.nbytes(numel), torch.uint8, buffer.device)
    if out is None:
        out = torch.empty(numel, dtype=dtype, device=buffer.device)
    _check_flat("out", out, numel, dtype, buffer.device)
    row = buffer if _is_aligned(buffer) else buffer.clone()
    with torch.no_grad():
        find_backend(out.device).decode(row.view(1, -1), out.detach().view(1, -1), fmt)
    return out


def quantize_rows(
    x: Tensor, format: str | BlockFormat, out: Tensor, *, seed: int | None = None
) -> bool | None:
    """Quantize equal parts of a flat tensor, each into its own row.

    Row ``r`` gets the bytes that `quantize` makes of the ``r``-th part, with the seed
    ``seed + 0x9e3779b9 * r`` if there is one. NaN and Inf are carried. Rows may be in groups,
    [groups, rows of a group, bytes], with other strides between groups than between rows; a group's
    parts follow one another, and its seed is ``seed + 0x9e3779b1 * group``.

    Args:
        x: flat, contiguous, as many times n elements of fp32, bf16, fp16 or fp64 as ``out`` has
            rows.
        format: "int8", "int4", "e4m3", "e5m2" or a `BlockFormat`.
        out: uint8, ``quantized_nbytes(n, format)`` columns, on the device of ``x`` and not
            overlapping it. Rows are contiguous and start at multiples of 16 bytes; bytes between
            them are left unchanged.
        seed: as of `quantize`.

    Returns:
        Whether ``x`` has NaN or Inf; None where knowing would synchronize with a device.

    Raises:
        ValueError: an argument that doesn't fit, by name.
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
        values = x.detach().view(num_rows, numel)
        return find_backend(x.device).encode(values, out, fmt, _check_seed(seed))


def dequantize_rows(rows: Tensor, numel: int, format: str | BlockFormat, out: Tensor) -> None:
    """Dequantize the rows that `quantize_rows` made into a flat tensor.

    Args:
        rows: uint8, ``quantized_nbytes(numel, format)`` columns; rows as in `quantize_rows`.
        numel: elements of one row.
        format: as given to `quantize_rows`.
        out: receives the values, row after row: flat, contiguous, fp32, bf16, fp16 or fp64, on the
            device of ``rows`` and not overlapping it.

    Raises:
        ValueError: an argument that doesn't fit, by name.
    """
    fmt = BlockFormat.make(format)
    _check_rows("rows", rows, fmt.nbytes(numel), out.device)
    check_float("out", out.dtype)
    num_rows = math.prod(rows.shape[:-1])
    _check_flat("out", out, num_rows * numel, out.dtype, rows.device)
    with torch.no_grad():
        find_backend(out.device).decode(rows, out.detach().view(num_rows, numel), fmt)


def dequantize_sum(rows: Tensor, numel: int, format: str | BlockFormat, out: Tensor) -> None:
    """Sum the dequantized rows in fp32, from the first to the last, each group by itself.

    Args:
        rows: uint8, ``quantized_nbytes(numel, format)`` columns, at least one row; rows as in
            `quantize_rows`.
        numel: elements of one row.
        format: as given to `quantize_rows`.
        out: receives the sum, or those of the groups one after another: fp32, 1-D, contiguous, on
            the device of ``rows`` and not overlapping it.

    Raises:
        ValueError: an argument that doesn't fit, by name.
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
    """Raise ValueError if ``dtype``, that of argument ``name``, is none that is quantized."""
    if dtype not in QUANTIZABLE_DTYPES:
        raise ValueError(f"{name} must be fp32, bf16, fp16 or fp64, got {dtype}")


def _check_seed(seed: int | None) -> int | None:
    return None if seed is None else int(seed) % 2**32


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
    if tensor.numel() != numel:
        raise ValueError(f"{name} must have {numel} elements, got {tensor.numel()}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def _refuse_nonfinite(row: Tensor, numel: int, fmt: BlockFormat) -> None:
    """Raise if the scale of a block marks NaN or Inf."""
    is_bad = read_scales(row, numel, fmt)[:, 0].isnan()
    bad = is_bad.nonzero().view(-1)
    if not len(bad):
        return
    start = int(bad[0]) * fmt.block_size
    raise ValueError(
        f"x has NaN or Inf in {len(bad)} of {len(is_bad)} blocks, the first among elements "
        f"[{start}, {start + fmt.block_size}); pass nonfinite='carry' to let them through"
    )
