"""The ledger of gradients offered for the coming step.

A segment says where the gradient of ``[start, stop)`` lies: in ``source``, element ``i`` at
``source[i - base]``. On the host all segments of one dtype share one flat buffer, so neighbours
merge and a run of pieces is one stretch of memory; on the device a segment is the caller's tensor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["GradLedger"]


@dataclass(frozen=True, slots=True)
class _Segment:
    start: int
    stop: int
    source: Tensor
    base: int

    def clip(self, start: int, stop: int) -> _Segment:
        return _Segment(max(self.start, start), min(self.stop, stop), self.source, self.base)

    def continues(self, other: _Segment) -> bool:
        same = self.source is other.source and self.base == other.base
        return same and self.stop == other.start

    def view(self) -> Tensor:
        return self.source[self.start - self.base : self.stop - self.base]


class GradLedger:
    """Sorted, disjoint segments; a later offer replaces an earlier one where they overlap."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._segments: list[_Segment] = []

    def add(self, start: int, stop: int, source: Tensor, base: int) -> None:
        """Note that ``source[start - base : stop - base]`` is the gradient of the range."""
        if start == stop:
            return
        new = _Segment(start, stop, source, base)
        lo = bisect_left(self._starts, start)
        if lo and self._segments[lo - 1].stop >= start:
            lo -= 1
        hi = lo
        while hi < len(self._segments) and self._segments[hi].start <= stop:
            hi += 1
        self._replace(lo, hi, new)

    def _replace(self, lo: int, hi: int, new: _Segment) -> None:
        """Put ``new`` over segments ``lo..hi``, which touch it, and merge what continues."""
        touched = self._segments[lo:hi]
        left = [old.clip(old.start, new.start) for old in touched if old.start < new.start]
        right = [old.clip(new.stop, old.stop) for old in touched if old.stop > new.stop]
        merged: list[_Segment] = []
        for part in (*left, new, *right):
            if merged and merged[-1].continues(part):
                last = merged.pop()
                part = _Segment(last.start, part.stop, part.source, part.base)
            merged.append(part)
        self._segments[lo:hi] = merged
        self._starts[lo:hi] = [part.start for part in merged]

    def take(self, spans: Sequence[tuple[int, int]]) -> GradLedger:
        """Move what covers the spans to a ledger of its own.

        Raises:
            ValueError: a part of a span was not offered; nothing has moved then.
        """
        found = [part for span in spans for part in self._parts(*span)]
        taken = GradLedger()
        for part in found:
            taken.add(part.start, part.stop, part.source, part.base)
        for start, stop in spans:
            self._drop(start, stop)
        return taken

    def _drop(self, start: int, stop: int) -> None:
        lo = max(bisect_left(self._starts, start + 1) - 1, 0)
        hi = bisect_left(self._starts, stop)
        touched = self._segments[lo:hi]
        left = [old.clip(old.start, start) for old in touched if old.start < start]
        right = [old.clip(stop, old.stop) for old in touched if old.stop > stop]
        kept = [part for part in (*left, *right) if part.start < part.stop]
        self._segments[lo:hi] = kept
        self._starts[lo:hi] = [part.start for part in kept]

    def segments(self, start: int, stop: int) -> list[tuple[int, int, Tensor]]:
        """``(a, b, gradient)`` parts that cover ``[start, stop)`` without a gap.

        Raises:
            ValueError: some of the range was not offered.
        """
        return [(part.start, part.stop, part.view()) for part in self._parts(start, stop)]

    def _parts(self, start: int, stop: int) -> list[_Segment]:
        found: list[_Segment] = []
        at = start
        first = max(bisect_left(self._starts, start + 1) - 1, 0)
        for index in range(first, len(self._segments)):
            segment = self._segments[index]
            if at >= stop or segment.start > at:
                break
            if segment.stop > at:
                found.append(segment.clip(at, stop))
                at = found[-1].stop
        if at < stop:
            raise ValueError(
                f"no gradient was offered for [{at}, {stop}), which a piece listed in `active` "
                f"needs; call offer_grad before step"
            )
        return found

    def gather(self, start: int, stop: int, dtype: torch.dtype, grad_scale: float) -> Tensor:
        """The gradient of the range as one tensor of ``dtype``, times ``grad_scale``.

        It is the offered memory itself where nothing has to be changed.
        """
        parts = self.segments(start, stop)
        if len(parts) == 1 and parts[0][2].dtype == dtype and grad_scale == 1.0:
            return parts[0][2]
        device = parts[0][2].device
        grad = torch.empty(stop - start, dtype=dtype, device=device)
        for a, b, part in parts:
            grad[a - start : b - start].copy_(part)
        return grad if grad_scale == 1.0 else grad.mul_(grad_scale)
