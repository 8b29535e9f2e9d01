"""What quantized gathers have in common: which shards to quantize, and reading the result.

A **part** is one rank's quantized buffer inside the gathered bytes; parts lie in rank order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero_comm.block_format import BlockFormat
from zero_comm.quantizer import QUANTIZABLE_DTYPES, dequantize_rows

__all__ = ["dequantize_parts", "is_worth_quantizing"]


def is_worth_quantizing(dtype: torch.dtype, numel: int, fmt: BlockFormat) -> bool:
    """Whether a shard travels quantized: a float whose bytes become fewer.

    Integers and bytes can't be quantized, and a shard of less than a block or so would only grow
    by its padding; both travel as they are, exactly. The answer depends on nothing but the
    arguments, so that all ranks agree.
    """
    return dtype in QUANTIZABLE_DTYPES and fmt.nbytes(numel) < numel * dtype.itemsize


def dequantize_parts(gathered: Tensor, out: Tensor, *, world_size: int, fmt: BlockFormat) -> None:
    """Fill ``out`` with every rank's values.

    Args:
        gathered: uint8, 1-D, ``world_size`` parts of equal length.
        out: 1-D, contiguous, ``world_size`` shards of equal length, of the dtype quantized.
        world_size: number of parts.
        fmt: how they were quantized.
    """
    dequantize_rows(gathered.view(world_size, -1), out.numel() // world_size, fmt, out)
