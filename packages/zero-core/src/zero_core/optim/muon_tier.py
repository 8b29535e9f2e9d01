"""The state tier of an optimizer that needs whole matrices: `zero_core.optim.muon`, over slices.

Momenta, master weights and updates are sliced as any state is (`zero_core.optim.device_tier`). Once
per step, for each segment that has matrices, the ranks gather the momenta of the segment in bf16,
in which the direction is computed anyway; then each rank computes the directions of those matrices
of which it holds a slice, and takes its slice. So a matrix is computed by two ranks only where it
lies across the bound of two shards, and the memory is that of one segment in bf16.

Unlike in any other tier, ``step`` is a collective: every rank calls it once per step.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_core.comm.control import ControlGroup
from zero_core.comm.meter import MATRICES, Meter
from zero_core.errors import ConfigError
from zero_core.layout.arithmetic import Layout, Segment
from zero_core.optim.device_tier import DeviceTier
from zero_core.optim.muon import Direction, Muon, direction_of


class MatrixTier(DeviceTier):
    """`zero_core.protocols.StateTier` on the compute device, for `zero_core.optim.muon.Muon`."""

    turn_numel = sys.maxsize  # a slice of a matrix is one parameter

    def __init__(
        self,
        *,
        layout: Layout,
        control: ControlGroup,
        meter: Meter,
        is_sharded: bool,
        group_of: Mapping[int, int],
        groups: Sequence[Mapping[str, Any]],
        **kwargs: Any,
    ) -> None:
        """Make this rank's tier.

        ``is_sharded`` says whether it covers a shard of each segment, or all of it. ``group_of``
        has the optimizer group of each trainable parameter. ``control`` gathers momenta, and
        ``meter`` counts them. The rest is of `zero_core.protocols.DeviceTierFactory`.
        """
        super().__init__(groups=groups, **kwargs)
        self._layout = layout
        self._control = control
        self._meter = meter
        self._is_sharded = is_sharded
        self._starts = layout.local_starts(is_sharded=is_sharded)
        self._placed = layout.pieces(control.rank, is_sharded=is_sharded)
        matrices = {param for param, group in group_of.items() if groups[group]["use_muon"]}
        for param in matrices:
            spec = layout.params[param]
            if len(spec.shape) != 2:
                raise ConfigError(
                    f"parameter {spec.name} of shape {spec.shape} is in a group with use_muon, "
                    "and is no matrix: put it into a group without"
                )
        self._segments = [
            s
            for s in layout.segments
            if s.is_trainable and any(slot.param in matrices for slot in s.slots)
        ]
        if self._optimizer is not None:
            assert isinstance(self._optimizer, Muon)
            self._optimizer.directions = self._directions

    def step(
        self, groups: Sequence[Mapping[str, Any]], active: Sequence[int], *, grad_scale: float
    ) -> None:
        """Update as the protocol says. Every rank must call it, whatever it has to update."""
        if active:
            super().step(groups, active, grad_scale=grad_scale)
        else:
            self._directions([])

    def _is_full(self, *_: object) -> bool:
        """Take all pieces in one turn: every rank gathers once per segment, in one order."""
        return False

    def _directions(self, updates: Sequence[Any]) -> list[Direction]:
        """Return the directions of slices of matrices, for `Muon.directions`, as a collective."""
        number_of = {id(parts[0].param): index for index, parts in enumerate(self._parts)}
        asked = {number_of[id(update.param)]: update for update in updates}
        found: dict[int, Direction] = {}
        for segment in self._segments:
            mine = {i: u for i, u in asked.items() if self._placed[i].segment == segment.index}
            momenta = self._gather(self._own_momenta(segment, mine))
            for index, update in mine.items():
                found[index] = self._slice_of_direction(segment, index, momenta, update.group)
        return [found[index] for index in asked]

    def _gather(self, momenta: Tensor) -> Tensor:
        """Gather every rank's 1-D ``momenta``, in rank order, as a collective.

        Where every rank holds the whole segment there is nothing to gather.
        """
        if not self._is_sharded:
            return momenta
        self._meter.add_all_gather(MATRICES, momenta.nbytes)
        # As bytes: not every backend knows bf16.
        return self._control.gather_on_device(momenta.view(torch.uint8)).view(momenta.dtype)

    def _own_momenta(self, segment: Segment, updates: Mapping[int, Any]) -> Tensor:
        """Return this rank's part of a segment, in bf16, zero where there is no momentum."""
        low, high = self._layout.state_range(
            segment, self._control.rank, is_sharded=self._is_sharded
        )
        flat = torch.zeros(high - low, dtype=torch.bfloat16, device=self._device)
        base = self._starts[segment.index]
        for index, update in updates.items():
            piece = self._placed[index]
            flat[piece.start - base : piece.stop - base] = update.momentum
        return flat

    def _slice_of_direction(
        self, segment: Segment, index: int, momenta: Tensor, group: Mapping[str, Any]
    ) -> Direction:
        piece = self._placed[index]
        slot = next(s for s in segment.slots if s.param == piece.param)
        matrix = momenta[slot.start : slot.stop].view(self._layout.params[piece.param].shape)
        direction = direction_of(matrix, group)
        stop = piece.offset + piece.stop - piece.start
        return Direction(direction.values.reshape(-1)[piece.offset : stop], direction.factor)
