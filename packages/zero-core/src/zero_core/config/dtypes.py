"""Torch's dtypes by the configuration's names. The rest of `zero_core.config` needs no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
WIDE_DTYPES = (torch.float32, torch.float64)
"""Dtypes of parameters that are their own master weights under any configuration."""


def master_dtype(dtype: torch.dtype, own: Collection[torch.dtype]) -> torch.dtype:
    """Return the dtype of the master weights of a ``dtype``: itself if it is ``own``, or fp32."""
    return dtype if dtype in own else torch.float32
