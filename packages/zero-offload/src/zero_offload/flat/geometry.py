"""Layout of parameters in the local flat space, as pure arithmetic.

[Note: terms]
flat space   elements ``[0, numel)`` whose optimizer state this process owns, padding included.
piece        range of one parameter in the flat space. Pieces are sorted and disjoint.
shard        1-D tensor in the parameters' dtype over ``[start, start + tensor.numel())``, to which
             new values are written. Each piece is inside one shard.
run          contiguous elements of one shard that a step updates and then publishes, that is,
             copies to the shard, at once.
part         set of elements (`Intervals`) that one tier holds. Numbered without gaps, these
             elements form a flat space too, in which a piece or shard may become several.
split point  element at which the host's elements begin or end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from zero_offload.protocols import Groups

T = TypeVar("T")


class SpanMap(Generic[T]):
    """Values over sorted, disjoint spans ``[start, stop)``, found by element or by range."""

    __slots__ = ("_items", "_starts")

    def __init__(self, items: Iterable[tuple[int, int, T]] = ()) -> None:
        self._items = list(items)
        self._starts = [start for start, _, _ in self._items]

    def last_from(self, element: int) -> tuple[int, int, T] | None:
        """Return the last span that starts at or before ``element``, or None."""
        index = bisect_right(self._starts, element) - 1
        return self._items[index] if index >= 0 else None

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, T]]:
        """Yield ``(a, b, value)`` for each part of ``[start, stop)`` in a span, in order."""
        for index in range(max(bisect_right(self._starts, start) - 1, 0), len(self._items)):
            low, high, value = self._items[index]
            if low >= stop:
                return
            a, b = max(start, low), min(stop, high)
            if a < b:
                yield a, b, value

    def divide(self, start: int, stop: int) -> Iterator[tuple[int, int, T | None]]:
        """Yield ``(a, b, value)`` parts that cover ``[start, stop)``, in order. A gap has None."""
        for a, b, value in self.overlaps(start, stop):
            if start < a:
                yield start, a, None
            yield a, b, value
            start = b
        if start < stop:
            yield start, stop, None

    def put(self, start: int, stop: int, value: T) -> None:
        if start < stop:
            self.discard(start, stop)
            index = bisect_left(self._starts, start)
            self._items.insert(index, (start, stop, value))
            self._starts.insert(index, start)

    def discard(self, start: int, stop: int) -> None:
        """Remove ``[start, stop)``. A span that extends beyond it keeps its other elements."""
        low = max(bisect_right(self._starts, start) - 1, 0)
        high = bisect_left(self._starts, stop)
        kept = []
        for a, b, value in self._items[low:high]:
            kept += [(a, min(b, start), value)] if a < start else []
            kept += [(max(a, stop), b, value)] if b > stop else []
        self._items[low:high] = kept
        self._starts[low:high] = [a for a, _, _ in kept]


class Intervals:
    """Immutable set of elements. ``spans`` are its sorted, disjoint ``[a, b)`` pairs."""

    __slots__ = ("_bases", "_elements", "numel", "spans")

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        spans: list[tuple[int, int]] = []
        for start, stop in sorted(pairs):
            if not 0 <= start <= stop:
                raise ValueError(f"[{start}, {stop}) is no interval of a flat space")
            if spans and start <= spans[-1][1]:
                spans[-1] = (spans[-1][0], max(stop, spans[-1][1]))
            elif start < stop:
                spans.append((start, stop))
        self.spans = tuple(spans)
        self.numel = 0
        bases = []
        for start, stop in self.spans:
            bases.append((start, stop, self.numel))
            self.numel += stop - start
        self._bases = SpanMap(bases)
        self._elements = SpanMap((base, base + b - a, a) for a, b, base in bases)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Intervals) and self.spans == other.spans

    def __bool__(self) -> bool:
        return bool(self.spans)

    def __repr__(self) -> str:
        return f"Intervals({list(self.spans)})"

    def local(self, element: int) -> int:
        """Return the number of the set's elements below ``element``: its offset in the set."""
        found = self._bases.last_from(element)
        if found is None:
            return 0
        start, stop, base = found
        return base + min(element, stop) - start

    def element(self, local: int) -> int:
        """Return the set's element at offset ``local``. Inverts the method `local`."""
        found = self._elements.last_from(local)
        assert found is not None, "an empty set has no elements"
        base, _, start = found
        return start + local - base

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the spans ``(a, b)`` of ``[start, stop)`` that are in the set, in order."""
        return ((a, b) for a, b, _ in self._bases.overlaps(start, stop))

    def divide(self, start: int, stop: int) -> Iterator[tuple[int, int, bool]]:
        """Yield ``(a, b, is_in_set)`` parts that cover ``[start, stop)``, in order."""
        return ((a, b, base is not None) for a, b, base in self._bases.divide(start, stop))

    def complement(self, numel: int) -> Intervals:
        ends = [0, *(stop for _, stop in self.spans)]
        starts = [*(min(start, numel) for start, _ in self.spans), numel]
        return Intervals((a, b) for a, b in zip(ends, starts, strict=True) if a < b)

    def intersection(self, other: Intervals) -> Intervals:
        return Intervals(pair for span in other.spans for pair in self.overlaps(*span))

    def union(self, other: Intervals) -> Intervals:
        return Intervals((*self.spans, *other.spans))

    def difference(self, other: Intervals) -> Intervals:
        end = self.spans[-1][1] if self.spans else 0
        return self.intersection(other.complement(end))


PUBLISHED_NUMEL = 1 << 24
"""Default maximum elements published at once, few enough that updates overlap with copies."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``[start, stop)`` of one parameter in the group ``param_groups[group]``."""

    start: int
    stop: int
    group: int


@dataclass(frozen=True, slots=True)
class Run:
    """Elements ``[start, stop)`` of adjacent ``pieces`` (indices) with equal settings ``key``."""

    start: int
    stop: int
    pieces: tuple[int, ...]
    key: Hashable = None


class Geometry:
    """The checked layout of one flat space: its pieces and its shards.

    Args:
        pieces: ``(start, stop, group)``, sorted, disjoint, each inside one shard.
        params: ``(start, tensor)``, sorted, disjoint, 1-D, contiguous and floating point.
        master_dtype: dtype of the master weights, by default float64 if a shard is float64 and
            float32 otherwise. A part has the dtype of the whole space, so a split changes no value.
        published_numel: maximum elements that are published at once, by default `PUBLISHED_NUMEL`.
    """

    def __init__(
        self,
        numel: int,
        pieces: Sequence[tuple[int, int, int]],
        params: Sequence[tuple[int, Tensor]],
        num_groups: int,
        *,
        master_dtype: torch.dtype | None = None,
        published_numel: int | None = None,
    ) -> None:
        self.numel = numel
        self.published_numel = published_numel or PUBLISHED_NUMEL
        self.pieces = tuple(Piece(*piece) for piece in pieces)
        self.shards = tuple(params)
        self._num_groups = num_groups
        is_wide = any(tensor.dtype == torch.float64 for _, tensor in self.shards)
        self.master_dtype = master_dtype or (torch.float64 if is_wide else torch.float32)
        end = 0
        for i, (start, tensor) in enumerate(self.shards):
            if tensor.dim() != 1 or not tensor.is_contiguous():
                raise ValueError(f"params[{i}] must be 1-D and contiguous, is {tensor.shape}")
            if not tensor.is_floating_point():
                raise ValueError(f"params[{i}] must be floating point, is {tensor.dtype}")
            if start < end or start + tensor.numel() > self.numel:
                raise ValueError(
                    f"params[{i}] covers [{start}, {start + tensor.numel()}), which overlaps the "
                    f"one before or leaves the flat space [0, {self.numel})"
                )
            end = start + tensor.numel()
        self._shards = SpanMap((a, a + t.numel(), i) for i, (a, t) in enumerate(self.shards))
        self._pieces = SpanMap((p.start, p.stop, i) for i, p in enumerate(self.pieces))
        self.piece_shards = tuple(self._check_piece(i, num_groups) for i in range(len(self.pieces)))

    def _check_piece(self, index: int, num_groups: int) -> int:
        piece = self.pieces[index]
        previous = self.pieces[index - 1].stop if index else 0
        where = f"pieces[{index}] = [{piece.start}, {piece.stop})"
        if not previous <= piece.start < piece.stop:
            raise ValueError(f"{where} is empty, unsorted or overlaps the one before")
        if not 0 <= piece.group < num_groups:
            raise ValueError(f"{where} names group {piece.group}; there are {num_groups}")
        shard = self.shard_at(piece.start)
        if shard < 0 or piece.stop > self.shards[shard][0] + self.shards[shard][1].numel():
            raise ValueError(f"{where} does not lie inside one tensor of params")
        return shard

    def check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.numel:
            raise ValueError(f"[{start}, {stop}) is not within the flat space [0, {self.numel})")

    def align(self, share: Intervals, alignment: int) -> Intervals:
        """Move each bound of ``share`` inside a piece down to an aligned offset in the piece."""
        return Intervals(
            (self._align_down(start, alignment), self._align_down(stop, alignment))
            for start, stop in share.spans
        )

    def _align_down(self, split: int, alignment: int) -> int:
        found = self._pieces.last_from(split)
        if found is None or split >= found[1]:
            return split
        start = found[0]
        return start + (split - start) // alignment * alignment

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int, Tensor]]:
        """Yield ``(a, b, view of the shard)`` for each part of ``[start, stop)`` in a shard."""
        for a, b, index in self._shards.overlaps(start, stop):
            base, tensor = self.shards[index]
            yield a, b, tensor[a - base : b - base]

    def shard_at(self, start: int) -> int:
        """Return the index of the last shard that starts at or before ``start``, or -1."""
        found = self._shards.last_from(start)
        return -1 if found is None else found[2]

    def view(self, start: int, stop: int) -> Tensor:
        """Return the memory of ``[start, stop)``, a range inside one shard."""
        (_, _, view), *rest = self.overlaps(start, stop)
        assert not rest, "a run crosses shards"
        assert view.numel() == stop - start, "a run leaves its shard"
        return view

    def padded_spans(self, indices: Sequence[int]) -> Intervals:
        """Return the elements of some pieces, each with the padding up to the next piece."""
        ends = [*(piece.start for piece in self.pieces[1:]), self.numel]
        return Intervals((self.pieces[i].start, ends[i]) for i in indices)

    def part(self, share: Intervals) -> tuple[Geometry, dict[int, tuple[int, ...]]]:
        """Return the geometry of ``share``, and its piece indices by those of this geometry."""
        pieces: list[tuple[int, int, int]] = []
        local: dict[int, tuple[int, ...]] = {}
        for i, piece in enumerate(self.pieces):
            found = [
                (share.local(a), share.local(a) + b - a, piece.group)
                for a, b in share.overlaps(piece.start, piece.stop)
            ]
            if found:
                local[i] = tuple(range(len(pieces), len(pieces) + len(found)))
                pieces.extend(found)
        shards = [
            (share.local(a), view) for span in share.spans for a, _, view in self.overlaps(*span)
        ]
        part = Geometry(
            share.numel,
            pieces,
            shards,
            self._num_groups,
            master_dtype=self.master_dtype,
            published_numel=self.published_numel,
        )
        return part, local


def split_runs(runs: Sequence[Run], numel: int) -> list[Run]:
    """Split runs into runs of at most ``numel`` elements, each with the whole run's ``pieces``."""
    return [
        Run(low, min(low + numel, run.stop), run.pieces, run.key)
        for run in runs
        for low in range(run.start, run.stop, numel)
    ]


def plan_runs(
    geometry: Geometry, active: Sequence[int], keys: Mapping[int, Hashable] | None = None
) -> list[Run]:
    """Merge adjacent active pieces of one shard and one key into runs, in order."""
    runs: list[Run] = []
    for i in active:
        piece, key = geometry.pieces[i], None if keys is None else keys[i]
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.stop == piece.start
            and last.key == key
            and geometry.piece_shards[last.pieces[-1]] == geometry.piece_shards[i]
        ):
            runs[-1] = Run(last.start, piece.stop, (*last.pieces, i), key)
        else:
            runs.append(Run(piece.start, piece.stop, (i,), key))
    return runs


def check_active(geometry: Geometry, active: Sequence[int]) -> tuple[int, ...]:
    indices = tuple(active)
    bounds = (-1, *indices, len(geometry.pieces))
    if any(a >= b for a, b in pairwise(bounds)):
        raise ValueError(
            f"active must be sorted, unique piece indices below {len(geometry.pieces)}: {active}"
        )
    return indices


def _plain(value: Any) -> Any:
    """Replace one-element tensors by numbers, also inside tuples and lists."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return type(value)(_plain(item) for item in value)
    return value


def freeze_groups(groups: Groups) -> list[dict[str, Any]]:
    """Copy groups without parameters, so that a scheduler's changes do not reach the copies."""
    left_out = ("params", "param_names")
    return [{k: _plain(v) for k, v in group.items() if k not in left_out} for group in groups]
