"""Norms of a gradient: of a shard, of the segments of a rank, and of all ranks.

`PLAIN` adds squares as they come. `INVARIANT` has the same bits at any world size: see
[Note: one norm for any world size] in `zero_core.core.exact_sums`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from zero_core.comm.control import ControlGroup
from zero_core.comm.fused_sum import norm_of
from zero_core.config import Config
from zero_core.core.exact_sums import NUM_BINS, bin_powers, chunk_norms, sum_bins


class Norms(Protocol):
    """Arithmetic of a gradient's norms.

    Attributes:
        num_sums: length of the vector that `add_squares` returns.
    """

    num_sums: int

    def measure(self, values: Tensor, p: float = 2.0, dtype: torch.dtype | None = None) -> Tensor:
        """Return the ``p``-norm of a shard, [shard_numel]: 0-dimensional, or one of each chunk.

        In fp32 or wider; ``dtype`` is that in which the powers are added up, where it is given.
        """
        ...

    def of_reduction(self, norm: Tensor) -> Tensor | None:
        """Return what `measure` does, if the ``norm`` that a reduction took on its way is that."""
        ...

    def add_squares(self, norms: Sequence[Tensor], squares: Sequence[Tensor]) -> Tensor:
        """Add up a rank's segments: [num_sums], float64. Ranks add such vectors.

        Args:
            norms: by segment, of `measure`.
            squares: of segments of which only these are known, [1] each.
        """
        ...

    def finish(self, sums: Tensor) -> None:
        """Replace the first of ``sums``, those of `add_squares`, by the square sum."""
        ...

    def over_ranks(self, norms: Sequence[Tensor], p: float, control: ControlGroup) -> float:
        """Return the ``p``-norm of all ranks' shards. Every rank must call it.

        Args:
            norms: by segment, of `measure`: float64, on one device.
        """
        ...


class _Plain:
    num_sums = 1

    def measure(self, values: Tensor, p: float = 2.0, dtype: torch.dtype | None = None) -> Tensor:
        return norm_of(values, p, dtype)

    def of_reduction(self, norm: Tensor) -> Tensor | None:
        return norm

    def add_squares(self, norms: Sequence[Tensor], squares: Sequence[Tensor]) -> Tensor:
        sums = [*squares]
        if norms:
            sums.append(torch.stack([*norms]).to(torch.float64).square())
        return torch.cat(sums).sum().view(1)

    def finish(self, sums: Tensor) -> None:
        """Do nothing: it is the square sum."""

    def over_ranks(self, norms: Sequence[Tensor], p: float, control: ControlGroup) -> float:
        local = torch.linalg.vector_norm(torch.stack([*norms]), p)
        return float(torch.linalg.vector_norm(control.gather(local.view(1)), p))


class _Invariant:
    num_sums = NUM_BINS

    def measure(self, values: Tensor, p: float = 2.0, dtype: torch.dtype | None = None) -> Tensor:
        return chunk_norms(values, p)

    def of_reduction(self, norm: Tensor) -> Tensor | None:
        return None

    def add_squares(self, norms: Sequence[Tensor], squares: Sequence[Tensor]) -> Tensor:
        assert not squares, "the engine adds up gradients, not the tier"
        return bin_powers(torch.cat([*norms]))

    def finish(self, sums: Tensor) -> None:
        sums[0] = sum_bins(sums)

    def over_ranks(self, norms: Sequence[Tensor], p: float, control: ControlGroup) -> float:
        if math.isinf(p):
            return PLAIN.over_ranks([norm.max() for norm in norms], p, control)
        bins = control.sum(bin_powers(torch.cat([*norms]), p))
        return math.pow(float(sum_bins(bins)), 1.0 / p)


PLAIN: Norms = _Plain()
INVARIANT: Norms = _Invariant()


def norms_of(config: Config) -> Norms:
    """Return the arithmetic that a configuration asks for."""
    return INVARIANT if config.world_size_invariant else PLAIN
