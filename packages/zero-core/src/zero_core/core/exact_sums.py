"""Sums of powers that do not depend on who adds which part, or in what order.

[Note: one norm for any world size]
Addition of rounded numbers depends on their order, and another number of ranks adds in another one.
With ``world_size_invariant`` a norm is therefore taken in two parts that do not:
- norms of **chunks**, `CHUNK_NUMEL` elements at fixed places of a segment. Shards are whole chunks
  (`zero_core.layout.arithmetic.Layout.build`), and a chunk is a row of one operator, on its own.
- **bins**: each chunk's power is rounded to 24 bits and added to the bin of its exponent, where all
  terms are integers. Sums of integers below 2**53 are exact in float64, in any order. A bin holds
  2**28 chunks, 2**38 elements.
This is a reproducible sum by indexed bins (Demmel and Nguyen, "Fast Reproducible Floating-Point
Summation", ARITH 2013), with bins at fixed places and a single level.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero_core.comm.fused_sum import sum_dtype
from zero_core.layout.arithmetic import CHUNK_NUMEL

_MANTISSA_BITS = 24
_BIN_BITS = 2
_LEAST_EXPONENT, _LARGEST_EXPONENT = -160, 160
NUM_BINS = (_LARGEST_EXPONENT - _LEAST_EXPONENT) // _BIN_BITS
"""Bins cover powers from 2**-161 up to 2**160: smaller ones count as zero, larger as infinite."""
_ROWS = 1024
"""Chunks that an accelerator reduces at once: a kernel's order may depend on its shape."""


def chunk_norms(values: Tensor, p: float = 2.0) -> Tensor:
    """Return the ``p``-norm of each chunk of 1-D ``values``, in fp32 (float64 for float64)."""
    rows, dtype = values.view(-1, CHUNK_NUMEL), sum_dtype(values.dtype)
    if values.is_cpu:  # where each row is reduced by itself
        return _row_norms(rows, p, dtype)
    norms = [_row_norms(part, p, dtype) for part in torch.split(rows, _ROWS)]
    missing = -len(rows) % _ROWS
    if missing:
        last = rows[len(rows) - len(rows) % _ROWS :]
        padded = torch.nn.functional.pad(last, (0, 0, 0, missing))
        norms[-1] = _row_norms(padded, p, dtype)[: len(last)]
    return torch.cat(norms)


def _row_norms(rows: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, p, dim=1, dtype=dtype)
    return norms


def bin_powers(norms: Tensor, p: float = 2.0) -> Tensor:
    """Return the sums of the chunks' ``norms ** p`` by bin: [NUM_BINS], float64.

    Such vectors may be added in any order.
    """
    powers = norms.to(torch.float64).pow(p)
    mantissa, exponent = torch.frexp(powers)
    place = exponent - _LEAST_EXPONENT
    index = place.div(_BIN_BITS, rounding_mode="floor").clamp(0, NUM_BINS - 1)
    whole = (mantissa * 2.0**_MANTISSA_BITS).round()
    whole = torch.ldexp(whole, place.remainder(_BIN_BITS))
    whole = torch.where((place < 0) & powers.isfinite(), 0.0, whole)
    whole = torch.where(place >= NUM_BINS * _BIN_BITS, torch.inf, whole)
    bins = torch.zeros(NUM_BINS, dtype=torch.float64, device=norms.device)
    return bins.index_add_(0, index.long(), whole)


def sum_bins(bins: Tensor) -> Tensor:
    """Return the sum that ``bins`` hold: 0-dimensional, float64."""
    first = 2.0 ** (_LEAST_EXPONENT - _MANTISSA_BITS)
    scale = torch.arange(NUM_BINS, dtype=torch.float64, device=bins.device)
    return (bins * torch.ldexp(torch.full_like(scale, first), scale * _BIN_BITS)).sum()
