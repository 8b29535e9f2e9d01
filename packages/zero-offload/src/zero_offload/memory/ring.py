"""Ring of host memory, whose spans are taken in order and freed in any order.

A span is contiguous. It ends where the memory ends or where the oldest span in use begins. A
span that does not fit before the end of the memory begins at its start. The gap that it leaves is
free again with that span.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes of a cache line, to whose multiples spans are rounded up."""


def aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(slots=True, eq=False)
class RingSpan:
    """Memory that was taken from a ring: ``memory`` is uint8, 1-D."""

    start: int
    memory: Tensor
    is_free: bool = False


class HostRing:
    """Host memory of ``capacity`` bytes, allocated with the first span. One thread uses it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._memory: Tensor | None = None
        self._spans: deque[RingSpan] = deque()  # in use, and free ones behind such
        self._head = 0  # where the next span begins

    def take(self, nbytes: int) -> RingSpan | None:
        """Return a span of ``nbytes``, rounded up, or None if there is no room for it now."""
        needed = aligned(nbytes)
        start = self._place(needed)
        if start is None:
            return None
        if self._memory is None:
            # Aligned to a cache line, wherever the allocator begins.
            memory = torch.empty(self.capacity + ALIGNMENT, dtype=torch.uint8, device="cpu")
            self._memory = memory[-memory.data_ptr() % ALIGNMENT :][: self.capacity]
        span = RingSpan(start, self._memory[start : start + needed])
        self._spans.append(span)
        self._head = start + needed
        return span

    def _place(self, needed: int) -> int | None:
        if not self._spans:
            self._head = 0
            return 0 if needed <= self.capacity else None
        tail = self._spans[0].start
        if tail >= self._head:  # it has gone round
            return self._head if needed <= tail - self._head else None
        if needed <= self.capacity - self._head:
            return self._head
        return 0 if needed <= tail else None

    def free(self, span: RingSpan) -> None:
        """Free a span. Its memory is reused once all spans before it are free."""
        span.is_free = True
        while self._spans and self._spans[0].is_free:
            self._spans.popleft()
