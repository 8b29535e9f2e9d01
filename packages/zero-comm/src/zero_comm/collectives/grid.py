"""Two-dimensional grid of ranks: gathers go between groups first, then within each group.

[Note: the two phases]
W ranks are split into groups of G consecutive ones: nodes, or hpZ's partitions. A unit's buffer has
a slice of s elements for each rank: [groups, G, s]. **Phase 1**, inter-group: the ranks with the
same position in their groups gather their slices among themselves, W / G of them. Each slice enters
every group once. **Phase 2**, intra-group: the ranks of a group exchange what phase 1 brought, and
everything is put in place.
"""

from __future__ import annotations

from torch import Tensor

from zero_comm.transport.protocol import TransportCollectives
from zero_comm.transport.scratch import Scratch


class Grid:
    """Ranks in groups of equal size. Every rank must construct it. See [Note: the two phases].

    Args:
        transport: carries the bytes.
        group_size: G; divides the number of ranks.
    """

    def __init__(self, transport: TransportCollectives, group_size: int) -> None:
        rank, size = transport.rank, group_size
        self.num_groups = transport.world_size // size
        self.group_size = size
        self.group, position = divmod(rank, size)
        self.peers = [g * size + position for g in range(self.num_groups)]
        """Ranks at this rank's position in every group."""
        self._inter_group = transport.subgroup(self.peers) if self.num_groups > 1 else None
        own_group = [self.group * size + i for i in range(size)]
        self._intra_group = transport.subgroup(own_group) if size > 1 else None

    def gather_inter_group(self, rows: Tensor, row: Tensor, *, unit: int, backward: bool) -> None:
        """Fill ``rows`` ([groups, n], any dtype) with the ``row`` of every group: phase 1."""
        if self._inter_group is None:
            rows[0].copy_(row)
            return
        flat = rows.view(-1)
        self._inter_group.all_gather(flat, row, unit=unit, version=0, backward=backward).wait()

    def gather_intra_group(self, out: Tensor, rows: Tensor, *, unit: int, backward: bool) -> None:
        """Fill ``out`` ([G, groups, n]) with the ``rows`` of every rank of the group: phase 2."""
        if self._intra_group is None:
            out[0].copy_(rows)
            return
        work = self._intra_group.all_gather(
            out.view(-1), rows.view(-1), unit=unit, version=0, backward=backward
        )
        work.wait()

    def gather_values(
        self, out: Tensor, rows: Tensor, scratch: Scratch, *, unit: int, backward: bool
    ) -> None:
        """Gather ``rows`` [groups, s] of the group's ranks into flat ``out``, in rank order."""
        shape = (self.group_size, self.num_groups, rows.shape[1])
        if self.num_groups == 1:
            self.gather_intra_group(out.view(shape), rows, unit=unit, backward=backward)
            return
        if self._intra_group is None:
            out.copy_(rows.view(-1))
            return
        arrived = scratch.take("values", out.numel(), out.dtype, out.device).view(shape)
        self.gather_intra_group(arrived, rows, unit=unit, backward=backward)
        out.view(self.num_groups, self.group_size, -1).copy_(arrived.transpose(0, 1))
