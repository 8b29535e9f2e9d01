"""Sets of elements of a flat space, as sorted disjoint intervals. Pure arithmetic.

A part of a flat space (the host's share, say) is such a set. Its elements, one after another
without the gaps, are the part's own flat space: `Intervals.local` maps the one to the other, and
keeps order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

__all__ = ["Intervals"]


class Intervals:
    """An immutable set of elements: ``[a, b)`` pairs in any order, which may touch or overlap.

    Attributes:
        spans: the same elements as sorted pairs that neither touch nor overlap.
        numel: how many elements there are.

    Raises:
        ValueError: a pair is negative or ends before it starts.
    """

    __slots__ = ("_bases", "_starts", "numel", "spans")

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        self.spans = _merged(sorted(pairs))
        self._starts = [start for start, _ in self.spans]
        self._bases: list[int] = []
        self.numel = 0
        for start, stop in self.spans:
            self._bases.append(self.numel)
            self.numel += stop - start

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Intervals) and self.spans == other.spans

    def __hash__(self) -> int:
        return hash(self.spans)

    def __bool__(self) -> bool:
        return bool(self.spans)

    def __repr__(self) -> str:
        return f"Intervals({list(self.spans)})"

    def local(self, element: int) -> int:
        """How many elements of the set lie below ``element``: its place in the compacted space."""
        index = bisect_right(self._starts, element) - 1
        if index < 0:
            return 0
        start, stop = self.spans[index]
        return self._bases[index] + min(element, stop) - start

    def element(self, local: int) -> int:
        """The element at place ``local`` of the compacted space; the inverse of `local`."""
        index = bisect_right(self._bases, local) - 1
        return self.spans[index][0] + local - self._bases[index]

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The stretches ``(a, b)`` of ``[start, stop)`` that are in the set, in order."""
        first = max(bisect_right(self._starts, start) - 1, 0)
        for index in range(first, len(self.spans)):
            low, high = self.spans[index]
            if low >= stop:
                return
            a, b = max(start, low), min(stop, high)
            if a < b:
                yield a, b

    def covers(self, start: int, stop: int) -> bool:
        """Whether every element of ``[start, stop)`` is in the set."""
        return self.local(stop) - self.local(start) == max(stop - start, 0)

    def complement(self, numel: int) -> Intervals:
        """The elements of ``[0, numel)`` that are not in the set."""
        ends = [0, *(stop for _, stop in self.spans)]
        starts = [min(start, numel) for start in (*self._starts, numel)]
        return Intervals((a, b) for a, b in zip(ends, starts, strict=True) if a < b)

    def intersection(self, other: Intervals) -> Intervals:
        """The elements of both."""
        return Intervals(pair for span in other.spans for pair in self.overlaps(*span))

    def union(self, other: Intervals) -> Intervals:
        """The elements of either."""
        return Intervals((*self.spans, *other.spans))

    def difference(self, other: Intervals) -> Intervals:
        """The elements that are not in ``other``."""
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
