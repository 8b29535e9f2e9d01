"""Quantizer backend of Triton kernels for CUDA, ROCm and XPU, or Triton's interpreter on a CPU.

The bytes and values equal those of `zero_comm.quantizer.torch_backend`. The backend never waits for
the device. `triton_tiles` has the kernels, `triton_arithmetic` their arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, Final

import torch
import triton
from torch import Tensor

from zero_comm.quantizer.block_format import BlockFormat
from zero_comm.quantizer.torch_backend import in_groups
from zero_comm.quantizer.triton_tiles import decode_kernel, decode_sum_kernel, encode_kernel

LARGEST_BLOCK_SIZE: Final = 1 << 15  # elements: 64 per thread of the largest program
_TILE_NUMEL: Final = 1 << 12  # 32 elements per thread hide the latency of loads
_WARPS: Final = 4
_DTYPE_NAME: Final = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# Fused multiply-add would round once instead of twice and change bytes.
LAUNCH_OPTIONS: Final[Mapping[str, Any]] = MappingProxyType({"enable_fp_fusion": False})
# Upper limit of the maximum as fp32 bits: the largest bfloat16 that the dtype can hold.
_LARGEST_BITS: Final = {"fp32": 0x7F7F0000, "bf16": 0x7F7F0000, "fp16": 0x477F0000}


class TritonBackend:
    """`Backend` whose kernels run on the tensors' device and its current stream."""

    name = "triton"

    def encode(self, x: Tensor, rows: Tensor, fmt: BlockFormat, seed: int | None) -> None:
        if not rows.numel():
            return
        if x.dtype == torch.float64:
            x = x.to(torch.float32)
        dtype = _DTYPE_NAME[x.dtype]
        signed = ((seed or 0) ^ 2**31) - 2**31  # as an int32: all seeds share one compiled kernel
        _launch(
            encode_kernel,
            fmt,
            x,
            (_typed(x), rows, x.shape[1], _stride(x), *_place(rows), signed),
            DTYPE=dtype,
            LARGEST_BITS=_LARGEST_BITS["fp32" if fmt.has_rotation else dtype],
            IS_STOCHASTIC=seed is not None,
        )

    def decode(self, rows: Tensor, out: Tensor, fmt: BlockFormat) -> None:
        if not out.numel():
            return
        if out.dtype == torch.float64:
            narrow = torch.empty_like(out, dtype=torch.float32)
            self.decode(rows, narrow, fmt)
            out.copy_(narrow)
            return
        _launch(
            decode_kernel,
            fmt,
            out,
            (rows, _typed(out), out.shape[1], *_place(rows), _stride(out)),
            DTYPE=_DTYPE_NAME[out.dtype],
        )

    def decode_sum(self, rows: Tensor, out: Tensor, fmt: BlockFormat) -> None:
        if out.numel():
            totals = out.view(len(in_groups(rows)), -1)
            arguments = (rows, out, totals.shape[1], *_place(rows))
            _launch(decode_sum_kernel, fmt, totals, arguments)


def _launch(
    kernel: Any, fmt: BlockFormat, values: Tensor, arguments: tuple[Any, ...], **constants: Any
) -> None:
    shared = constants_of(fmt)
    num_tiles = -(-fmt.num_blocks(values.shape[1]) // shared["BLOCKS"])
    with on_device(values.device):
        kernel[(len(values) * num_tiles,)](*arguments, **constants, **shared, **LAUNCH_OPTIONS)


def constants_of(fmt: BlockFormat) -> dict[str, Any]:
    """Return the compile-time arguments that all kernels share, and the number of warps."""
    if fmt.block_size > LARGEST_BLOCK_SIZE:
        raise ValueError(
            f"the triton backend takes blocks of up to {LARGEST_BLOCK_SIZE} elements, got "
            f"block_size {fmt.block_size}: choose a smaller one, or set ZERO_COMM_BACKEND=torch"
        )
    columns = triton.next_power_of_2(fmt.block_size)
    return {
        "BLOCK": fmt.block_size,
        "BLOCKS": max(1, _TILE_NUMEL // columns),
        "COLUMNS": columns,
        "KIND": fmt.kind,
        "IS_SYMMETRIC": fmt.is_symmetric,
        "HAS_ROTATION": fmt.has_rotation,
        "num_warps": min(16, _WARPS * max(1, columns // _TILE_NUMEL)),
    }


def _typed(x: Tensor) -> Tensor:
    # The kernels convert bfloat16 themselves, from and to int16.
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def _place(rows: Tensor) -> tuple[int, int, int]:
    """Return the strides of groups and of rows in a group, and the number of rows per group."""
    groups = in_groups(rows)
    return _stride(groups), _stride(groups[0]), groups.shape[1]


def _stride(rows: Tensor) -> int:
    """Return the first dimension's stride, or 0 for size 1, which compiles as aligned."""
    return rows.stride(0) if len(rows) > 1 else 0


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make ``device`` the current device, on which Triton launches."""
    return nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)


BACKEND: Final = TritonBackend()
