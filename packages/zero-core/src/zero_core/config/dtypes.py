"""Torch's dtypes by the configuration's names. `zero_core.config` needs torch only here."""

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
    """Return the dtype of master weights for a parameter dtype: itself if in ``own``, else fp32."""
    return dtype if dtype in own else torch.float32
