"""What crosses the links when new weights go from group to group: phase 1 of a gather.

See [Note: the two phases] in `zero_comm.grid`. A carrier brings a secondary shard, [groups, s],
up to date with this rank's shard and those of the other groups.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from zero_comm.grid import Grid
from zero_comm.message import Packing
from zero_comm.scratch import Scratch

__all__ = ["Carrier", "Differences", "Exact", "Messages"]


class Carrier(Protocol):
    """Brings secondary shards up to date."""

    def refresh(
        self, secondary: Tensor, shard: Tensor, *, is_void: bool, unit: int, backward: bool
    ) -> None:
        """Make ``secondary`` ([groups, s]) hold what the shards of its groups are now.

        A collective. ``is_void``: what it holds is nothing of this unit, on any rank.
        """
        ...


class Exact:
    """Carries the shards as they are."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def refresh(
        self, secondary: Tensor, shard: Tensor, *, is_void: bool, unit: int, backward: bool
    ) -> None:
        """See `Carrier`: every bit."""
        self._grid.gather_across(secondary, shard, unit=unit, backward=backward)


class Messages:
    """Carries quantized shards (qwZ)."""

    def __init__(self, grid: Grid, packing: Packing, scratch: Scratch) -> None:
        self._grid = grid
        self._packing = packing
        self._scratch = scratch

    def refresh(
        self, secondary: Tensor, shard: Tensor, *, is_void: bool, unit: int, backward: bool
    ) -> None:
        """See `Carrier`: what quantizing leaves of the shards, this rank's own too."""
        rows = self._exchange(shard, unit=unit, backward=backward)
        self._packing.unpack(rows, secondary.view(-1), senders=self._grid.across_ranks)

    def _exchange(self, values: Tensor, *, unit: int, backward: bool) -> Tensor:
        nbytes, device = self._packing.nbytes(values.numel()), values.device
        sent = self._scratch.take("message", nbytes, torch.uint8, device)
        self._packing.pack(values, sent.view(1, -1))
        num_groups = self._grid.num_groups
        rows = self._scratch.take("messages", num_groups * nbytes, torch.uint8, device)
        rows = rows.view(num_groups, nbytes)
        self._grid.gather_across(rows, sent, unit=unit, backward=backward)
        return rows


class Differences(Messages):
    """Carries how far the shards are from what was published of them, in few bits.

    SDP4Bit (Jia et al., arXiv 2410.15526), section 3.1: weights change little from step to step, so
    the change needs fewer bits than the weights. What the others hold is known exactly, as this
    rank adds the same messages, so what a message could not say is part of the next difference. A
    copy that is void is sent exactly, once.
    """

    def refresh(
        self, secondary: Tensor, shard: Tensor, *, is_void: bool, unit: int, backward: bool
    ) -> None:
        """See `Carrier`: the published values plus the quantized change."""
        if is_void:
            self._grid.gather_across(secondary, shard, unit=unit, backward=backward)
            return
        own = secondary[self._grid.group]
        change = self._fp32("change", shard).copy_(shard).sub_(own)
        rows = self._exchange(change, unit=unit, backward=backward)
        for group, published in enumerate(secondary):
            sender = self._grid.across_ranks[group]
            self._packing.unpack(rows[group : group + 1], change, senders=[sender])
            # The sum in fp32 and one rounding: the same bits in every group.
            published.copy_(change.add_(published))

    def _fp32(self, purpose: str, like: Tensor) -> Tensor:
        return self._scratch.take(purpose, like.numel(), torch.float32, like.device)
