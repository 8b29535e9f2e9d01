"""The state tier of an optimizer that needs whole matrices: `zero_core.muon`, over slices.

Momenta, master weights and updates are sliced as any state is (`zero_core.tier`). Once per step,
for each segment that has matrices, the ranks gather the momenta of the segment in bf16, in which
the direction is computed anyway; then each rank computes the directions of those matrices of which
it holds a slice, and takes its slice. So a matrix is computed by two ranks only where it
lies across the bound of two shards, and the memory is that of one segment in bf16.

Unlike in any other tier, ``step`` is a collective: every rank calls it once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_core.blueprint import Blueprint
from zero_core.collectives import ControlGroup
from zero_core.comm_report import MATRICES, Meter
from zero_core.config import Config
from zero_core.errors import ConfigError
from zero_core.layout import Layout, Segment
from zero_core.muon import Direction, Muon, direction_of
from zero_core.protocols import StateTier, StateTierFactory
from zero_core.tier import DeviceTier

__all__ = ["MatrixTier", "matrix_tiers"]


class MatrixTier(DeviceTier):
    """`zero_core.protocols.StateTier` on the compute device, for `zero_core.muon.Muon`."""

    def __init__(
        self,
        *,
        layout: Layout,
        rank: int,
        is_sharded: bool,
        group_of: Mapping[int, int],
        gather: Callable[[Tensor], Tensor],
        groups: Sequence[Mapping[str, Any]],
        **kwargs: Any,
    ) -> None:
        """Make a tier for ``rank``.

        Args:
            layout: where every element lives.
            rank: whose tier this is.
            is_sharded: whether it covers a shard of each segment, or all of it.
            group_of: the optimizer group of each trainable parameter.
            gather: every rank's 1-D tensor, in rank order, on the device; a collective.
            groups: see `zero_core.protocols.DeviceTierFactory`, as for ``kwargs``.
            kwargs: what else that takes.
        """
        super().__init__(groups=groups, **kwargs)
        self._layout = layout
        self._gather = gather if is_sharded else _itself
        self._starts = layout.local_starts(is_sharded=is_sharded)
        self._bounds = {
            s.index: layout.state_range(s, rank, is_sharded=is_sharded) for s in layout.segments
        }
        self._placed = layout.pieces(rank, is_sharded=is_sharded)
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
        """See the protocol; but every rank must call it, whatever it has to update."""
        if active:
            super().step(groups, active, grad_scale=grad_scale)
        else:
            self._directions([])

    def _turns(self, active: Sequence[int]) -> list[list[int]]:
        """All at once, so that every rank gathers once per segment, in one order."""
        return [list(active)]

    def _directions(self, updates: Sequence[Any]) -> list[Direction]:
        """`Muon.directions` for slices of matrices; a collective."""
        number_of = {id(param): index for index, param in enumerate(self._pieces)}
        asked = {number_of[id(update.param)]: update for update in updates}
        found: dict[int, Direction] = {}
        for segment in self._segments:
            mine = {i: u for i, u in asked.items() if self._placed[i].segment == segment.index}
            momenta = self._gather(self._own_momenta(segment, mine))
            for index, update in mine.items():
                found[index] = self._slice_of_direction(segment, index, momenta, update.group)
        return [found[index] for index in asked]

    def _own_momenta(self, segment: Segment, updates: Mapping[int, Any]) -> Tensor:
        """This rank's part of a segment, in bf16; zero where there is no momentum."""
        low, high = self._bounds[segment.index]
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


def _itself(tensor: Tensor) -> Tensor:
    """Where every rank holds the whole segment there is nothing to gather."""
    return tensor


def matrix_tiers(
    given: StateTierFactory | None,
    drawn: Blueprint,
    config: Config,
    control: ControlGroup,
    meter: Meter,
) -> StateTierFactory:
    """What makes the tier for a `zero_core.muon.Muon`, in place of ``given``.

    Raises:
        ConfigError: the state is to be kept elsewhere.
    """
    device = config.zero_optimization.offload_optimizer.device
    if given is not None or device != "none":
        asked = "state_tier" if given is not None else f"offload_optimizer.device = {device!r}"
        raise ConfigError(
            f"{asked} with Muon is not served: its step needs whole matrices, which the engine's "
            "own tier alone gathers; leave it out, or use AdamW or Lion"
        )

    def gather(momenta: Tensor) -> Tensor:
        meter.add_all_gather(MATRICES, momenta.nbytes)
        # As bytes: not every backend knows bf16.
        return control.gather_here(momenta.view(torch.uint8)).view(momenta.dtype)

    def make(**kwargs: Any) -> StateTier:
        own = ("numel", "pieces", "params", "device", "optimizer_class", "groups", "param_store")
        return MatrixTier(
            layout=drawn.layout,
            rank=control.rank,
            is_sharded=config.zero_optimization.stage >= 1,
            group_of=drawn.group_of,
            gather=gather,
            **{name: kwargs[name] for name in own},
        )

    return make
