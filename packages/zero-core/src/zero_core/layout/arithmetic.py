"""Arithmetic of the positions of all elements in flat buffers, without communication or storage.

[Note: layout terms]
parameter   one tensor of the model, counted once, even if it has several names (aliases)
unit        a block of the module tree that is gathered, computed and reduced together. Unit 0 is
            the root: parameters that belong to no block or to several. The last unit may be the
            tail: parameters of modules after the blocks (`zero_core.layout.discovery`)
segment     the parameters of one unit that share dtype and trainability, consecutive in one flat
            buffer. Each start is aligned. The end is padded to ``world_size * shard_numel``
component   a plain tensor of a quantized parameter, which counts as a parameter here:
            [Note: quantized parameters] in `zero_core.layout.discovery`. A unit's components are
            one segment of bytes, whatever their dtypes
slot        one parameter's ``[start, stop)`` within its segment
shard       one of the ``world_size`` equal slices of a segment, numbered by rank
local flat  the trainable slices that a rank's optimizer state covers, concatenated
space       (see `zero_core.protocols`)
piece       one parameter's part of the local flat space

The partitioning is that of ZeRO (Rajbhandari et al., arXiv 1910.02054), section 5. Flat units are
those of FSDP (Zhao et al., arXiv 2304.11277), section 3.2.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from zero_core._torch import DisableTorchFunction

ALIGNMENT = 32
"""Alignment of slots and shards in elements. With 16-bit elements, this is 64 bytes: a cache line
or a vector register. An unaligned weight would slow down the matrix kernels."""

BYTES_ALIGNMENT = 64
"""Alignment of components in bytes, sufficient for every dtype and for vector registers."""

CHUNK_NUMEL = 1024
"""Number of elements in a chunk of a segment. ``world_size_invariant`` takes norms of chunks."""


@dataclass(frozen=True)
class ParamSpec:
    """One parameter, described without its storage."""

    name: str  # first name in the module tree
    shape: tuple[int, ...]  # shape of the whole parameter
    dtype: torch.dtype  # compute dtype
    is_trainable: bool  # whether the optimizer updates it
    aliases: tuple[str, ...] = ()  # further names (tied weights)
    is_opaque: bool = False  # whether it is a component, whose segment holds bytes
    # Dimensions in memory order, slowest first, for example of channels-last convolutions. () is
    # the order of the shape. The slot has the elements in this order.
    order: tuple[int, ...] = ()
    twin: int | None = None  # index of an earlier component with the same memory

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def segment_dtype(self) -> torch.dtype:
        return torch.uint8 if self.is_opaque else self.dtype

    @property
    def slot_numel(self) -> int:
        return self.numel * self.dtype.itemsize if self.is_opaque else self.numel

    def to_elements(self, values: Tensor) -> Tensor:
        """Return the parameter's ``values`` as 1-D segment elements, as a view if possible."""
        if self.is_opaque:
            return flatten(values.detach(), self.order).view(torch.uint8)
        return flatten(values, self.order)

    def to_values(self, elements: Tensor) -> Tensor:
        """Return 1-D segment ``elements`` as a view in the parameter's shape and dtype."""
        flat = elements.view(self.dtype) if self.is_opaque else elements
        return unflatten(flat, self.shape, self.order)


@dataclass(frozen=True)
class Slot:
    """Range ``[start, stop)`` of parameter number ``param`` in its segment."""

    param: int
    start: int
    stop: int

    def common(self, low: int, high: int) -> tuple[int, int]:
        """Return the range of the parameter's elements in ``[low, high)`` of the segment."""
        first = min(max(low, self.start), self.stop)
        return first - self.start, max(first, min(high, self.stop)) - self.start


@dataclass(frozen=True)
class Segment:
    """Flat parameters of a unit that share dtype and trainability, or components of a unit."""

    index: int  # index in the whole layout
    unit: int  # index of the segment's unit
    dtype: torch.dtype
    is_trainable: bool
    slots: tuple[Slot, ...]  # slots of its parameters, in order; twins share a slot
    shard_numel: int  # elements per rank, padding included
    world_size: int
    is_opaque: bool = False  # whether elements are bytes (uint8)

    @cached_property
    def padded_numel(self) -> int:
        return self.shard_numel * self.world_size

    def shard_range(self, rank: int) -> tuple[int, int]:
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def gaps(self) -> Iterator[tuple[int, int]]:
        end = 0
        for slot in self.slots:
            if slot.start > end:
                yield end, slot.start
            end = max(end, slot.stop)
        if self.padded_numel > end:
            yield end, self.padded_numel


@dataclass(frozen=True)
class UnitLayout:
    """A unit: its name in the module tree ("" for the root) and its segments."""

    index: int
    name: str
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Piece:
    """Range ``[start, stop)`` of the local flat space: elements of ``param`` from ``offset`` on."""

    start: int
    stop: int
    param: int
    offset: int
    segment: int


def dim_order(tensor: Tensor) -> tuple[int, ...]:
    """Return the dimensions from the slowest to the fastest in memory.

    For a tensor that is empty or not dense, return the order of the shape.
    """
    dims, strides = tuple(range(tensor.ndim)), tensor.stride()
    # In dense tensors at most one of the dimensions with equal stride has a size other than 1. If
    # it precedes the others, `unflatten` restores the strides of channels-last formats.
    order = tuple(sorted(dims, key=lambda d: (-strides[d], -tensor.shape[d], d)))
    with DisableTorchFunction():  # permute() must not count as a read of the values
        return order if tensor.numel() and tensor.permute(order).is_contiguous() else dims


def flatten(tensor: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return the 1-D elements in memory ``order`` (see `ParamSpec`), as a view if possible."""
    return (tensor.permute(order) if order else tensor).reshape(-1)


def unflatten(flat: Tensor, shape: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    if not order:
        return flat.view(shape)
    dense = flat.view([shape[d] for d in order])
    return dense.permute([order.index(d) for d in range(len(order))])


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Layout:
    """Layout of the whole model for one world size."""

    world_size: int  # number of ranks that share each segment
    params: tuple[ParamSpec, ...]  # every parameter, once
    units: tuple[UnitLayout, ...]  # the root, the blocks in the order of the module tree, the tail
    has_tail: bool = False

    @classmethod
    def build(
        cls,
        params: Sequence[ParamSpec],
        units: Sequence[tuple[str, Sequence[int]]],
        world_size: int,
        *,
        is_in_chunks: bool = False,
        has_tail: bool = False,
    ) -> Layout:
        """Compute the layout of ``units``, each a name and the indices of its parameters.

        ``has_tail``: the last unit is the tail. ``is_in_chunks``: trainable shards consist of whole
        chunks of `CHUNK_NUMEL` elements, so that no chunk is on two ranks at any world size.

        Raises:
            ValueError: a parameter is in no unit or in two.
        """
        placed = sorted(p for _, members in units for p in members)
        if placed != list(range(len(params))):
            raise ValueError("every parameter must be in exactly one unit")
        laid: list[UnitLayout] = []
        count = itertools.count()
        for index, (name, members) in enumerate(units):
            segments = []
            alike: dict[tuple[torch.dtype, bool, bool], list[int]] = {}
            for p in members:
                spec = params[p]
                key = spec.segment_dtype, spec.is_trainable, spec.is_opaque
                alike.setdefault(key, []).append(p)
            for (dtype, is_trainable, is_opaque), same in alike.items():
                aligned = BYTES_ALIGNMENT if is_opaque else ALIGNMENT
                slots: dict[int, Slot] = {}
                end = 0
                for p in same:
                    start = round_up(end, aligned)
                    twin = params[p].twin
                    if twin is None:
                        end = start + params[p].slot_numel
                        slots[p] = Slot(p, start, end)
                    else:
                        slots[p] = Slot(p, slots[twin].start, slots[twin].stop)
                multiple = CHUNK_NUMEL if is_in_chunks and is_trainable else 1
                shard = round_up(-(-max(end, 1) // world_size), math.lcm(aligned, multiple))
                kind = dtype, is_trainable, tuple(slots.values()), shard, world_size, is_opaque
                segments.append(Segment(next(count), index, *kind))
            laid.append(UnitLayout(index, name, tuple(segments)))
        return cls(world_size, tuple(params), tuple(laid), has_tail)

    @property
    def tail(self) -> int | None:
        """Index of the tail unit, or None if there is no tail."""
        return len(self.units) - 1 if self.has_tail else None

    @property
    def last_block(self) -> int:
        """Index of the last block's unit, or 0 if there are no blocks."""
        return len(self.units) - 1 - self.has_tail

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """All segments in the order of their ``index``."""
        return tuple(s for unit in self.units for s in unit.segments)

    def local_spans(self, *, is_sharded: bool) -> dict[int, tuple[int, int]]:
        """Return each trainable segment's range in the local flat space, by segment index."""
        spans, end = {}, 0
        for segment in self.segments:
            if segment.is_trainable:
                start = end
                end += segment.shard_numel if is_sharded else segment.padded_numel
                spans[segment.index] = start, end
        return spans

    def local_numel(self, *, is_sharded: bool) -> int:
        """Return the length of the local flat space with padding, which is equal on all ranks."""
        spans = self.local_spans(is_sharded=is_sharded).values()
        return max((stop for _, stop in spans), default=0)

    def pieces(self, rank: int, *, is_sharded: bool) -> tuple[Piece, ...]:
        """Return the non-empty pieces of ``rank``'s local flat space in order."""
        found = []
        for index, (start, _) in self.local_spans(is_sharded=is_sharded).items():
            segment = self.segments[index]
            low, high = segment.shard_range(rank) if is_sharded else (0, segment.padded_numel)
            base = start - low
            for slot in segment.slots:
                first, last = max(slot.start, low), min(slot.stop, high)
                if first < last:
                    span = base + first, base + last
                    found.append(Piece(*span, slot.param, first - slot.start, index))
        return tuple(found)
