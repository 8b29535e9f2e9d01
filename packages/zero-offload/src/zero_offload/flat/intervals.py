"""Sets of elements of a flat space, and values over spans of them. Pure arithmetic.

A part of a flat space (the host's share, for example) is a set of elements. Without the gaps
between them these are the part's own flat space. `Intervals.local` maps the one to the other and
keeps the order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

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
        """Yield ``(a, b, value)``: the parts of ``[start, stop)`` that spans cover, in order."""
        for index in range(max(bisect_right(self._starts, start) - 1, 0), len(self._items)):
            low, high, value = self._items[index]
            if low >= stop:
                return
            a, b = max(start, low), min(stop, high)
            if a < b:
                yield a, b, value

    def divide(self, start: int, stop: int) -> Iterator[tuple[int, int, T | None]]:
        """Yield ``(a, b, value)`` parts that cover ``[start, stop)``, in order: None in a gap."""
        for a, b, value in self.overlaps(start, stop):
            if start < a:
                yield start, a, None
            yield a, b, value
            start = b
        if start < stop:
            yield start, stop, None

    def put(self, start: int, stop: int, value: T) -> None:
        """Set the value over ``[start, stop)``, in place of the values there."""
        if start < stop:
            self.discard(start, stop)
            index = bisect_left(self._starts, start)
            self._items.insert(index, (start, stop, value))
            self._starts.insert(index, start)

    def discard(self, start: int, stop: int) -> None:
        """Remove ``[start, stop)``. Spans that reach beyond it keep the elements outside."""
        low = max(bisect_right(self._starts, start) - 1, 0)
        high = bisect_left(self._starts, stop)
        kept = []
        for a, b, value in self._items[low:high]:
            kept += [(a, min(b, start), value)] if a < start else []
            kept += [(max(a, stop), b, value)] if b > stop else []
        self._items[low:high] = kept
        self._starts[low:high] = [a for a, _, _ in kept]


class Intervals:
    """An immutable set of elements, made of ``[a, b)`` pairs that may touch or overlap.

    ``spans`` are the same elements as sorted pairs that do neither.
    """

    __slots__ = ("_bases", "_elements", "numel", "spans")

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        self.spans = _merged(sorted(pairs))
        self.numel = 0
        bases = []
        for start, stop in self.spans:
            bases.append((start, stop, self.numel))
            self.numel += stop - start
        self._bases = SpanMap(bases)
        self._elements = SpanMap((base, base + b - a, a) for a, b, base in bases)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Intervals) and self.spans == other.spans

    def __hash__(self) -> int:
        return hash(self.spans)

    def __bool__(self) -> bool:
        return bool(self.spans)

    def __repr__(self) -> str:
        return f"Intervals({list(self.spans)})"

    def local(self, element: int) -> int:
        """Return the place of ``element`` in the compacted space: the number of elements below."""
        found = self._bases.last_from(element)
        if found is None:
            return 0
        start, stop, base = found
        return base + min(element, stop) - start

    def element(self, local: int) -> int:
        """Return the element at place ``local`` of the compacted space, the inverse of `local`."""
        found = self._elements.last_from(local)
        assert found is not None, "an empty set has no elements"
        base, _, start = found
        return start + local - base

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the spans ``(a, b)`` of ``[start, stop)`` that are in the set, in order."""
        return ((a, b) for a, b, _ in self._bases.overlaps(start, stop))

    def divide(self, start: int, stop: int) -> Iterator[tuple[int, int, bool]]:
        """Yield ``(a, b, is_in)``: the parts of a range in the set and between, in order."""
        return ((a, b, base is not None) for a, b, base in self._bases.divide(start, stop))

    def complement(self, numel: int) -> Intervals:
        """Return the elements of ``[0, numel)`` that are not in the set."""
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


def _merged(pairs: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    spans: list[tuple[int, int]] = []
    for start, stop in pairs:
        if not 0 <= start <= stop:
            raise ValueError(f"[{start}, {stop}) is no interval of a flat space")
        if start == stop:
            continue
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(stop, spans[-1][1]))
        else:
            spans.append((start, stop))
    return tuple(spans)
