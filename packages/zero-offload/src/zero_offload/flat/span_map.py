"""Values over disjoint spans of elements. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class SpanMap(Generic[T]):
    """Values over sorted, disjoint spans ``[start, stop)``, found by element or by range.

    Args:
        items: ``(start, stop, value)``, sorted and disjoint.
    """

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
