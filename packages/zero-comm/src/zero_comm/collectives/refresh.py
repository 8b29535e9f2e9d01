"""Refreshes of secondary shards with new weights: phase 1 of a gather.

See [Note: the two phases] in `zero_comm.collectives.grid`. A refresh brings a secondary shard,
[groups, s], up to date with this rank's shard and those of the other groups. It may send the
shards exactly, quantized, or as quantized differences.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from zero_comm.collectives.grid import Grid
from zero_comm.quantizer.message import Packing
from zero_comm.transport.scratch import Scratch


class SecondaryRefresh(Protocol):
    """Brings secondary shards up to date."""

    def refresh(
        self, secondary: Tensor, shard: Tensor, *, is_void: bool, unit: int, backward: bool
    ) -> None:
        """Fill ``secondary`` ([groups, s]) with the current shards of its groups. A collective.

        ``is_void`` says, alike on all ranks, that it holds no earlier values of this unit.
        """
        ...


class ExactRefresh:
    """Sends the shards in their own dtype."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def refresh(
        self, secondary: Tensor, shard: Tensor, *, is_void: bool, unit: int, backward: bool
    ) -> None:
        """Gather the exact shards."""
        self._grid.gather_inter_group(secondary, shard, unit=unit, backward=backward)


class QuantizedRefresh:
    """Sends quantized shards (qwZ)."""

    def __init__(self, grid: Grid, packing: Packing, scratch: Scratch) -> None:
        self._grid = grid
        self._packing = packing
        self._scratch = scratch

    def refresh(
        self, secondary: Tensor, shard: Tensor, *, is_void: bool, unit: int, backward: bool
    ) -> None:
        """Gather the dequantized shards, this rank's own included."""
        rows = self._exchange(shard, unit=unit, backward=backward)
        self._packing.unpack(rows, secondary.view(-1), senders=self._grid.peers)

    def _exchange(self, values: Tensor, *, unit: int, backward: bool) -> Tensor:
        nbytes, device = self._packing.nbytes(values.numel()), values.device
        sent = self._scratch.take("message", nbytes, torch.uint8, device)
        self._packing.pack(values, sent.view(1, -1))
        num_groups = self._grid.num_groups
        rows = self._scratch.take("messages", num_groups * nbytes, torch.uint8, device)
        rows = rows.view(num_groups, nbytes)
        self._grid.gather_inter_group(rows, sent, unit=unit, backward=backward)
        return rows


class DifferenceRefresh(QuantizedRefresh):
    """Sends quantized differences between the shards and their published values.

    SDP4Bit (Jia et al., arXiv 2410.15526), section 3.1: weights change little from step to step, so
    the change needs fewer bits than the weights. This rank adds the messages that it sends to its
    own copy as well, so it knows the others' values exactly, and the rounding error of a message is
    part of the next difference. A void copy is sent exactly, once.
    """

    def refresh(
        self, secondary: Tensor, shard: Tensor, *, is_void: bool, unit: int, backward: bool
    ) -> None:
        """Add the quantized changes to the published values."""
        if is_void:
            self._grid.gather_inter_group(secondary, shard, unit=unit, backward=backward)
            return
        own = secondary[self._grid.group]
        change = self._scratch.take("change", shard.numel(), torch.float32, shard.device)
        change.copy_(shard).sub_(own)
        rows = self._exchange(change, unit=unit, backward=backward)
        for group, published in enumerate(secondary):
            sender = self._grid.peers[group]
            self._packing.unpack(rows[group : group + 1], change, senders=[sender])
            # The sum in fp32 and one rounding: the same bits in every group.
            published.copy_(change.add_(published))
