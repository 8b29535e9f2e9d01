"""What checkpoints and exports read and write: the engine's state, seen through the layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from zero_core.collectives import ControlGroup
from zero_core.layout import Layout, ParamSpec, Piece
from zero_core.protocols import StateTier
from zero_core.segment_values import SegmentValues

__all__ = ["MASTER", "ShardedState"]

MASTER = "master_weight"


@dataclass(frozen=True)
class ShardedState:
    """Everything of the model that is sharded, on one rank.

    Attributes:
        module: the model, for its names and buffers.
        layout: where every element lives.
        values: the values of every segment, by segment index.
        tier: the master weights and optimizer state.
        control: small exchanges between the ranks.
        pieces: this rank's part of each trainable parameter.
        optimizer: its kind and number of groups, in words.
    """

    module: nn.Module
    layout: Layout
    values: tuple[SegmentValues, ...]
    tier: StateTier
    control: ControlGroup
    pieces: tuple[Piece, ...]
    optimizer: str

    def own_slice(self, segment: int) -> Tensor:
        """This rank's [shard_numel] of the master weights, or of the values if frozen; a CPU copy.

        One slice per rank, whatever the stage: where every rank holds the whole segment, it is
        that rank's part of it.
        """
        values = self.values[segment]
        if values.local_span is None:
            return values.read_shard().detach().cpu()
        return self.own_state(segment, MASTER)

    def own_state(self, segment: int, name: str) -> Tensor:
        """This rank's [shard_numel] of state ``name`` of a trainable segment; a CPU copy.

        Zeros, if the tier of this rank does not know the state.
        """
        start, stop = self.own_span(segment)
        if name not in self.tier.state_names():
            return torch.zeros(stop - start)
        return self.tier.read_state(name, start, stop)

    def own_span(self, segment: int) -> tuple[int, int]:
        """Where this rank's slice of a trainable segment lies in its local flat space."""
        span = self.values[segment].local_span
        assert span is not None
        layout = self.layout.segments[segment]
        if span[1] - span[0] == layout.shard_numel:
            return span
        low, high = layout.shard_range(self.control.rank)
        return span[0] + low, span[0] + high

    def covered(self, segment: int) -> tuple[int, int]:
        """The part of a trainable segment that this rank's optimizer state covers."""
        span = self.values[segment].local_span
        assert span is not None
        layout = self.layout.segments[segment]
        is_sharded = span[1] - span[0] == layout.shard_numel
        return self.layout.state_range(layout, self.control.rank, is_sharded=is_sharded)

    @property
    def device(self) -> torch.device:
        """Where the values are used."""
        return self.values[0].device

    def quiesce(self) -> None:
        """Nobody reads any shard any more, on this rank or another; every rank must call it.

        Before values are written from outside of a step.
        """
        for values in self.values:
            values.finish_gather(lambda: "a gather ahead of time")
        self.values[0].lane.synchronize()
        self.control.barrier()

    def frozen_parts(self) -> Iterator[tuple[Callable[[Tensor], None], str, int, int]]:
        """What stores frozen values here, and the ``[low, high)`` of which parameter it takes."""
        for segment in self.layout.segments:
            if segment.is_trainable:
                continue
            values = self.values[segment.index]
            low, high = values.stored
            for slot in segment.slots:
                first, last = max(low, slot.start), min(high, slot.stop)
                if first < last:
                    name = self.layout.params[slot.param].name
                    store = partial(values.overwrite, first)
                    yield store, name, first - slot.start, last - slot.start

    def full_params(self) -> Iterator[tuple[ParamSpec, Tensor]]:
        """Every parameter whole, on the CPU, unrounded; every rank must iterate to the end."""
        for segment in self.layout.segments:
            full = self.control.gather(self.own_slice(segment.index))
            for slot in segment.slots:
                spec = self.layout.params[slot.param]
                yield spec, full[slot.start : slot.stop].view(spec.shape).clone()

    def names(self) -> list[str]:
        """The keys of the model's state dict, in order, tied names included."""
        found = []
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            path = f"{prefix}." if prefix else ""
            kept = [n for n in module._buffers if n not in module._non_persistent_buffers_set]
            own = [n for n in (*module._parameters, *kept) if getattr(module, n) is not None]
            found += [path + name for name in own]
        return found

    def buffers(self) -> dict[str, Tensor]:
        """The persistent buffers of the model, on the CPU."""
        kept = set(self.names())
        return {
            name: buffer.detach().cpu().clone()
            for name, buffer in self.module.named_buffers(remove_duplicate=False)
            if name in kept
        }

    def owned_params(self) -> Iterator[tuple[int, ParamSpec]]:
        """Piece index and parameter of those whose first element this rank's state covers."""
        for index, piece in enumerate(self.pieces):
            if piece.offset == 0:
                yield index, self.layout.params[piece.param]


def load_buffers(module: nn.Module, saved: dict[str, Tensor]) -> None:
    """Copy ``saved`` buffers into the model's, in place."""
    own = dict(module.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        for name, value in saved.items():
            own[name].copy_(value)
