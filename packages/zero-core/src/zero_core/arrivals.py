"""Which units' gradients are all there: the order in which a backward's reductions are due.

[Note: order of reductions]
Units are reduced in the reverse order of the module tree, the root last, whatever order gradients
arrive in, so that every rank launches the same reductions in the same order. A unit is *complete*
when each gradient that is required has come, or when backward has *left* it for good. Where the
branch of a rank left a parameter out, its gradient never comes; waiting to the end of backward
would do for the numbers, but at stage 3 a peer that waits for the reduction gathers nothing, and
this rank needs its shards to get to that end.
A gradient that comes later all the same is *late*, and reduced in a second round.

[Note: trails]
A forward leaves a *trail*, the units in the order in which it used them; backward follows it from
its end to its start. What lies behind is left, unless an older forward that is still alive used it
too (two losses, one backward). Activation checkpointing computes several units again, in the order
of forward, before backward goes through the last of them: what is recomputed is followed only once
a gradient of it has come.
A unit that backward passes over (it returned its input, say) is *skipped*: other ranks may need it,
and gather it in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

from zero_core.unit import Unit

__all__ = ["Arrivals", "Forward"]


_NUM_KEPT = 16
"""Trails kept of forwards of which no saved weight is left; those of recomputed units are."""


class Forward:
    """One forward of the model; alive as long as a weight that it saved is."""

    __slots__ = ("__weakref__",)


class _Trail:
    """See [Note: trails]."""

    def __init__(self, forward: Forward) -> None:
        self.forward = weakref.ref(forward)
        self.units: list[int] = []
        """What is still to be followed."""
        self.is_pending = True
        """No backward has begun since the forward did."""

    def last_before(self, unit: int) -> int | None:
        """The place at which ``unit`` is reached next."""
        return next((i for i in reversed(range(len(self.units))) if self.units[i] == unit), None)


class Arrivals:
    """See the notes above."""

    def __init__(self, units: Sequence[Unit]) -> None:
        """``units`` with the root first, then the blocks in the order of the module tree."""
        trainable = [u for u in units if u.grads]
        self._order = [u for u in reversed(trainable) if not u.is_root]
        self._order += [u for u in trainable if u.is_root]
        self._next = 0  # into _order
        self._num_missing: dict[int, int] = {}  # gradients still to come, by unit
        self._trails: list[_Trail] = []
        self._followed: _Trail | None = None  # in this backward, last
        self._entered: set[int] = set()  # in this backward
        # What is being computed again: where in which trail, and whether a gradient of it has come.
        self._recomputed: tuple[_Trail, list[int]] | None = None
        self._has_come = False

    def forward_begins(self) -> Forward:
        """A forward with gradients begins; what it saves must hold the result."""
        forward = Forward()
        old = self._trails[:-_NUM_KEPT]  # where nobody steps, they would pile up
        self._trails = [t for t in old if t.forward() is not None] + self._trails[-_NUM_KEPT:]
        self._trails.append(_Trail(forward))
        return forward

    def used(self, unit: Unit) -> None:
        """The forward that began last went into ``unit``."""
        if self._trails and self._trails[-1].units[-1:] != [unit.index]:
            self._trails[-1].units.append(unit.index)

    def unused(self, unit: Unit) -> None:
        """What ``unit`` gave in the forward that began last needs no gradient."""
        if self._trails and self._trails[-1].units[-1:] == [unit.index]:
            self._trails[-1].units.pop()

    def begin(self) -> None:
        """A backward begins."""
        for trail in self._trails:
            trail.is_pending = False
        self._followed = None
        self._entered.clear()
        self._num_missing = {u.index: u.num_trainable for u in self._order}
        self._recomputed = None
        self._next = 0

    def enter(self, unit: Unit, forward: Forward | None) -> list[int]:
        """Backward goes into ``unit``, for what ``forward`` saved; None: to compute it again.

        Returns the units that it has skipped.
        """
        self._entered.add(unit.index)
        trail = self._trail_of(unit, forward)
        if trail is None or trail.last_before(unit.index) is None:
            return []
        self._followed = trail
        self._leave_recomputed()
        place = trail.last_before(unit.index)
        if place is None:
            return []
        if forward is not None:
            self._recomputed = None
            return self._follow(trail, place + 1)
        if self._recomputed is None or self._recomputed[0] is not trail:
            self._recomputed, self._has_come = (trail, [place]), False
        else:
            self._recomputed[1].append(place)
        return []

    def came(self, unit: int) -> int:
        """A gradient of unit number ``unit`` came; how many are missing, below 0 if it is late."""
        if self._recomputed is not None and not self._has_come:
            trail, places = self._recomputed
            self._has_come = unit in [trail.units[place] for place in places]
        self._num_missing[unit] = missing = self._num_missing[unit] - 1
        return missing

    def due(self) -> Iterator[Unit]:
        """The units to be reduced now, each once."""
        order = self._order
        while self._next < len(order) and self._num_missing[order[self._next].index] <= 0:
            self._next += 1
            yield order[self._next - 1]

    def skipped_last(self) -> Iterator[int]:
        """The units between those that backward entered and the start of the forward."""
        trail = self._followed or next(reversed(self._trails), None)
        if trail is not None:
            self._leave_recomputed()
            while trail.units:
                yield from self._follow(trail, len(trail.units) - 1)

    def rest(self) -> Iterator[Unit]:
        """The units that have not been due in this backward; it ends."""
        rest, self._next = self._order[self._next :], 0
        yield from rest

    def forget(self) -> None:
        """A step ends, or gradients are given up; forwards that wait for their backward stay."""
        self._next = 0
        self._recomputed = None
        self._trails = [trail for trail in self._trails if trail.is_pending]

    def _trail_of(self, unit: Unit, forward: Forward | None) -> _Trail | None:
        for trail in reversed(self._trails):
            is_it = unit.index in trail.units if forward is None else trail.forward() is forward
            if is_it:
                return trail
        return None

    def _leave_recomputed(self) -> None:
        """If backward has gone through what was computed again, follow the trail to its start."""
        if self._recomputed is not None and self._has_come:
            trail, places = self._recomputed
            self._follow(trail, min(places))
            self._recomputed = None

    def _follow(self, trail: _Trail, stop: int) -> list[int]:
        """Backward is done with what ``trail`` has from ``stop`` on; what it skipped of that."""
        skipped = []
        older = self._trails[: self._trails.index(trail)]
        while len(trail.units) > stop:
            unit = trail.units.pop()
            if unit not in self._entered:
                self._entered.add(unit)
                skipped.append(unit)
            is_ahead = unit in trail.units or any(
                unit in t.units for t in older if t.forward() is not None
            )
            if not is_ahead and unit in self._num_missing:
                self._num_missing[unit] = min(self._num_missing[unit], 0)
        return skipped
