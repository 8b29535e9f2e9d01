"""Which units' gradients are all there: the order in which a backward's reductions are due.

[Note: order of reductions]
Units are reduced in the reverse order of the module tree, the root last, whatever order gradients
arrive in, so that every rank launches the same reductions in the same order. A unit is *complete*
when each gradient that is required has come. Where a rank's branch left a parameter out, one never
comes; there, a unit is complete as soon as backward has left it for good: it was entered as often
as forward had used it, and is not the one in use. Waiting to the end of backward would do for the
numbers; but at stage 3 a peer that waits for the reduction gathers nothing, and the rank that it
waits for needs its shards to get to that end.
A gradient that comes later all the same is *late*, and reduced in a second round.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from zero_core.unit import Unit

__all__ = ["Arrivals"]


class Arrivals:
    """See [Note: order of reductions]."""

    def __init__(self, units: Sequence[Unit]) -> None:
        """``units`` with the root first, then the blocks in the order of the module tree."""
        trainable = [u for u in units if u.grads]
        self._order = [u for u in reversed(trainable) if not u.is_root]
        self._order += [u for u in trainable if u.is_root]
        self._next = 0  # into _order
        self._num_missing: dict[int, int] = {}  # gradients still to come, by unit
        self._num_uses: Counter[int] = Counter()  # by forward, not yet entered by backward
        self._entered: dict[int, int] = {}  # left for good if fewer gradients are missing

    def used(self, unit: Unit) -> None:
        """Forward went into ``unit``; backward will, as often."""
        self._num_uses[unit.index] += 1

    def begin(self) -> None:
        """A backward begins."""
        self._num_missing = {u.index: u.num_trainable for u in self._order}
        self._entered.clear()
        self._next = 0

    def enter(self, unit: Unit, *, is_recomputed: bool = False) -> None:
        """Backward goes into ``unit``, and has left others.

        ``is_recomputed``: as activation checkpointing computes several blocks again before it goes
        through the first of them, one of those is left only once it had a gradient.
        """
        index = unit.index
        self._num_uses[index] -= 1
        for other in [i for i in self._entered if i != index]:
            is_left = self._num_missing[other] < self._entered[other]
            if is_left and self._num_uses[other] <= 0:
                del self._entered[other]
                self._num_missing[other] = min(self._num_missing[other], 0)
        if index in self._num_missing:
            self._entered[index] = self._num_missing[index] + (not is_recomputed)

    def came(self, unit: int) -> int:
        """A gradient of unit number ``unit`` came; how many are missing, below 0 if it is late."""
        self._num_missing[unit] = missing = self._num_missing[unit] - 1
        return missing

    def due(self) -> Iterator[Unit]:
        """The units to be reduced now, each once."""
        order = self._order
        while self._next < len(order) and self._num_missing[order[self._next].index] <= 0:
            self._next += 1
            yield order[self._next - 1]

    def rest(self) -> Iterator[Unit]:
        """The units that have not been due in this backward; it ends."""
        rest, self._next = self._order[self._next :], 0
        yield from rest

    def forget(self) -> None:
        """A step ends, or what was computed is given up."""
        self._next = 0
        self._num_uses.clear()
