"""Operator ``zero_core::sum_slices``: sum all ranks' slices and compute statistics of the sum.

Reductions on accelerators use this operator. In one pass over the slices it adds them in rank
order, writes the sum, computes the sum's norm and finds the ranks whose slice has NaN or Inf. On
CUDA, ROCm and XPU the operator launches two Triton kernels (`zero_core.comm.triton_sum`). On other
devices, and where Triton is not installed, it uses torch operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of ``dtype`` are summed: fp32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_in_rank_order(out: Tensor, slices: Sequence[Tensor]) -> None:
    """Set ``out`` to ``slices[0] + slices[1] + ...``, added in fp32 (float64 for float64)."""
    wide = sum_dtype(slices[0].dtype)
    total = out if out.dtype == wide else torch.empty_like(out, dtype=wide)
    if len(slices) > 1 and slices[0].dtype == wide:
        torch.add(slices[0], slices[1], out=total)
        rest = slices[2:]
    else:
        total.copy_(slices[0])
        rest = slices[1:]
    for part in rest:
        total.add_(part)
    if total is not out:
        out.copy_(total)


def add_in_rank_order(out: Tensor, slices: Sequence[Tensor]) -> None:
    """Add ``slices`` to ``out`` one after another, each sum rounded to the dtype of ``out``."""
    for part in slices:
        out.add_(part)


def norm_of(values: Tensor, p: float = 2.0, dtype: torch.dtype | None = None) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values, p, dtype=dtype or sum_dtype(values.dtype))
    return norm


def sum_slices(
    slices: Tensor, out: Tensor, norm: Tensor | None = None, nonfinite: Tensor | None = None
) -> None:
    """Sum the rows of ``slices`` [ranks, n] in rank order, in fp32 (float64 for float64).

    ``out`` [n] receives the sum, rounded once. ``norm`` (0-dimensional, `sum_dtype` of ``out``)
    receives the 2-norm of ``out``. ``nonfinite`` (bool, [ranks]) is set to True for each row with
    NaN or Inf and is otherwise unchanged. All tensors are contiguous. All work is enqueued on the
    current stream.
    """
    torch.ops.zero_core.sum_slices(slices, out, norm, nonfinite)


def sum_by_torch(
    slices: Tensor, out: Tensor, norm: Tensor | None, nonfinite: Tensor | None
) -> None:
    """Compute `sum_slices` by torch operators. This is the reference definition."""
    sum_in_rank_order(out, slices.unbind())
    if norm is not None:
        norm.copy_(norm_of(out))
    if nonfinite is not None:
        find_nonfinite(slices, nonfinite)


def find_nonfinite(slices: Tensor, nonfinite: Tensor) -> None:
    """Set ``nonfinite[r]`` to True where row r of ``slices`` has NaN or Inf."""
    # The infinity norm propagates NaN and Inf, and needs no mask as large as the slices.
    largest = torch.linalg.vector_norm(slices, torch.inf, dim=1)
    nonfinite.logical_or_(largest.isfinite().logical_not_())


@cache
def _sum_on(kind: str) -> Callable[..., None]:
    if kind not in ("cuda", "xpu") or find_spec("triton") is None:
        return sum_by_torch
    from zero_core.comm.triton_sum import sum_by_triton

    return sum_by_triton


torch.library.define(
    "zero_core::sum_slices",
    "(Tensor slices, Tensor(a!) out, Tensor(b!)? norm, Tensor(c!)? nonfinite) -> ()",
)
torch.library.impl(
    "zero_core::sum_slices",
    "CompositeExplicitAutograd",
    lambda slices, *outs: _sum_on(slices.device.type)(slices, *outs),
)
