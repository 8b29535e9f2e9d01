"""Groups of ranks that a gather goes through: across them first, then within.

[Note: the two phases]
W ranks are cut into groups of G consecutive ones. A unit's buffer has a slice of s elements for
each rank: [groups, G, s]. **Phase 1**, across groups: the ranks with one number in their groups
gather their slices among themselves, W / G of them; each slice enters every group once.
**Phase 2**, within the group: the ranks hand each other what phase 1 gave, and everything is put in
place.

Groups are nodes, or hpZ's partitions.
"""

from __future__ import annotations

from torch import Tensor

from zero_comm.native import NativeCollectives
from zero_comm.scratch import Scratch

__all__ = ["Grid"]


class Grid:
    """The ranks in groups; see [Note: the two phases]. Every rank must make it.

    Args:
        native: carries the bytes.
        group_size: G; divides the number of ranks.
    """

    def __init__(self, native: NativeCollectives, group_size: int) -> None:
        rank, size = native.rank, group_size
        self.num_groups = native.world_size // size
        self.group_size = size
        self.group, self.place = divmod(rank, size)
        self.across_ranks = [g * size + self.place for g in range(self.num_groups)]
        self._across = native.subgroup(self.across_ranks) if self.num_groups > 1 else None
        near = [self.group * size + i for i in range(size)]
        self._within = native.subgroup(near) if size > 1 else None

    def gather_across(self, rows: Tensor, row: Tensor, *, unit: int, backward: bool) -> None:
        """Phase 1: ``rows`` ([groups, n], any dtype) = the ``row`` of every group, in order."""
        if self._across is None:
            rows[0].copy_(row)
            return
        flat = rows.view(-1)
        self._across.all_gather(flat, row, unit=unit, version=0, backward=backward).wait()

    def gather_within(self, out: Tensor, rows: Tensor, *, unit: int, backward: bool) -> None:
        """Phase 2: ``out`` ([G, groups, n]) = the ``rows`` of every rank of the group."""
        if self._within is None:
            out[0].copy_(rows)
            return
        flat = rows.view(-1)
        self._within.all_gather(out.view(-1), flat, unit=unit, version=0, backward=backward).wait()

    def gather_values(
        self, out: Tensor, rows: Tensor, scratch: Scratch, *, unit: int, backward: bool
    ) -> None:
        """Phase 2 of values: ``rows`` [groups, s] of every rank, put in place in flat ``out``."""
        shape = (self.group_size, self.num_groups, rows.shape[1])
        if self.num_groups == 1:
            self.gather_within(out.view(shape), rows, unit=unit, backward=backward)
            return
        if self._within is None:
            out.copy_(rows.view(-1))
            return
        arrived = scratch.take("values", out.numel(), out.dtype, out.device).view(shape)
        self.gather_within(arrived, rows, unit=unit, backward=backward)
        out.view(self.num_groups, self.group_size, -1).copy_(arrived.transpose(0, 1))
