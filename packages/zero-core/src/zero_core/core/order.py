"""Order in which units are gathered, and in which they are reduced in a backward.

Units are numbers here: 0 is the root, then blocks in the order of the module tree, then the tail.

[Note: order of reductions]
Units are reduced in the reverse order of the module tree, the root last, whatever order gradients
become ready in, so that every rank launches the same reductions in the same order. A unit is
*complete* when each gradient that is required is ready, or when backward has *left* it for good:
where the branch of a rank left a parameter out, its gradient never becomes ready. (To wait for the
end of backward would do for the numbers. But at stage 3 a peer that waits for the reduction gathers
nothing, and this rank needs its shards to reach that end.) A gradient that is ready after its unit
was complete is *late*, and reduced in a second round.

[Note: one order for gathers and reductions]
A rank that leaves a unit without all of its gradients launches its reduction then, before it
gathers anything more. On the other ranks it was launched when the last gradient was ready, which is
between the same two gathers. So the order of all launches, over both communicators, is one on all
ranks, branches or not. NCCL asks for that where communicators may share a hardware queue.

[Note: trails]
A forward leaves a *trail*, the units in the order in which it used them; backward follows it from
its end to its start. Units behind are left, unless an older forward that is still alive used them
too (two losses, one backward). Activation checkpointing computes several units again, in the order
of forward, before backward goes through the last of them: they are followed only once a gradient of
them is ready.
A unit that backward passes over (it returned its input, say) is *skipped*: other ranks may need it,
and this rank gathers it in the same order. So is one that the forward gathered ahead and *passed
by*: it stands in the trail, too. Not so within a checkpoint of several blocks, and where blocks are
computed again for several forwards of one backward: there ranks must run the same blocks.

[Note: blocks that need no gradient]
Backward does not go into a block whose output needs no gradient, as below the first trainable one.
At stage 3 it is not gathered either, if all ranks agreed on that in the step before. Else it counts
as a unit that backward skips, and all ranks gather it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence

_NUM_KEPT = 16
"""Newest trails kept though no saved weight of their forwards is left: blocks may be recomputed."""


class Forward:
    """A token for one forward of the model, alive while a weight that it saved is."""

    __slots__ = ("__weakref__",)


class _Trail:
    """Units that a forward used. See [Note: trails]."""

    def __init__(self, forward: Forward) -> None:
        self.forward = weakref.ref(forward)
        self.units: list[int] = []  # that backward has not reached yet, in forward order
        self.passed: set[int] = set()  # those among them that the forward passed by
        self.is_pending = True  # no backward has begun since the forward did

    def last_position(self, unit: int) -> int | None:
        """Return the position at which backward reaches ``unit`` next."""
        for position in range(len(self.units) - 1, -1, -1):
            if self.units[position] == unit:
                return position
        return None


class BackwardOrder:
    """Order of reductions and gathers. See the notes above."""

    def __init__(self, trainable: Sequence[int], tail: int | None, *, is_alone: bool) -> None:
        """``trainable``: the units that have gradients. ``is_alone``: no other rank gathers."""
        # The blocks in reverse, the tail, the root. The tail's gradients mostly come first. But one
        # that is not used, or that the blocks use too, would keep all other units waiting.
        self._order = sorted(trainable, key=lambda unit: (unit == 0, unit == tail, -unit))
        self._is_alone = is_alone
        # See [Note: blocks that need no gradient].
        self._without_grad: set[int] = set()
        self._with_grad: set[int] = set()
        self.left_out: frozenset[int] = frozenset()  # by all ranks, in this step
        self._next = 0  # into _order
        self._num_missing: dict[int, int] = {}  # gradients that are not ready, by unit
        self._trails: list[_Trail] = []
        self._followed: _Trail | None = None  # in this backward, last
        self._entered: set[int] = set()  # in this backward
        # Positions of a trail that are being computed again; whether a gradient of them is ready.
        self._recomputed: tuple[_Trail, list[int]] | None = None
        self._is_recomputed_ready = False

    # ---------------------------------------------------------------- forward

    def begin_forward(self) -> Forward:
        """Begin a forward with gradients. What it saves must hold the result."""
        forward = Forward()
        old = self._trails[:-_NUM_KEPT]  # where nobody steps, they would pile up
        self._trails = [t for t in old if t.forward() is not None] + self._trails[-_NUM_KEPT:]
        self._trails.append(_Trail(forward))
        return forward

    def use(self, unit: int) -> None:
        """Note that the forward that began last went into ``unit``."""
        if self._trails:
            trail = self._trails[-1]
            if unit in trail.passed:
                trail.passed.remove(unit)
                trail.units.remove(unit)
            if not trail.units or trail.units[-1] != unit:
                trail.units.append(unit)

    def pass_by(self, block: int) -> None:
        """Note that the forward that began last left out ``block``, which other ranks may use."""
        trail = self._trails[-1]
        if not (self._is_alone or block in self.left_out or block in trail.units):
            trail.units.append(block)
            trail.passed.add(block)

    def leave(self, block: int, *, needs_grad: bool) -> None:
        """Note whether the output of ``block`` needs a gradient, in the newest forward."""
        if needs_grad:
            self._with_grad.add(block)
            return
        self._without_grad.add(block)
        if (self._is_alone or block in self.left_out) and self._trails:
            units = self._trails[-1].units
            if units and units[-1] == block:
                units.pop()

    @property
    def unneeded(self) -> frozenset[int]:
        """Blocks that needed no gradient on this rank, in any forward of this step."""
        return frozenset(self._without_grad - self._with_grad)

    # --------------------------------------------------------------- backward

    def begin_backward(self, num_missing: Mapping[int, int]) -> None:
        """Begin a backward, which brings so many gradients of each unit."""
        for trail in self._trails:
            trail.is_pending = False
        self._followed = None
        self._entered.clear()
        self._num_missing = {unit: num_missing[unit] for unit in self._order}
        self._recomputed = None
        self._next = 0

    def enter(self, unit: int, forward: Forward | None) -> Iterator[int]:
        """Enter ``unit`` in backward, for what ``forward`` saved. None: to compute it again.

        Yields each unit that backward has skipped, before it is complete.
        """
        self._entered.add(unit)
        trails = reversed(self._trails)
        if forward is None:
            found = (t for t in trails if unit in t.units and unit not in t.passed)
        else:
            found = (t for t in trails if t.forward() is forward)
        trail = next(found, None)
        position = None if trail is None else trail.last_position(unit)
        if trail is None or position is None:
            return
        self._followed = trail
        if forward is None:
            self._with_grad.add(unit)  # reentrant checkpointing hid that in the forward
            if self._recomputed is not None and self._recomputed[0] is trail:
                # A checkpoint computes its units in the order of forward. So one that stands before
                # all of them begins another. Frozen ones show no gradient.
                again = {trail.units[p] for p in self._recomputed[1]}
                first = min(i for i, used in enumerate(trail.units) if used in again)
                self._is_recomputed_ready |= position < first
        if self._recomputed is not None:
            self._leave_recomputed()
            position = trail.last_position(unit)
            if position is None:
                return
        if forward is not None:
            self._recomputed = None
            yield from self._follow(trail, position + 1)
            return
        while len(trail.units) - 1 > position and trail.units[-1] in trail.passed:
            yield from self._follow(trail, len(trail.units) - 1)
        if self._recomputed is None or self._recomputed[0] is not trail:
            self._recomputed, self._is_recomputed_ready = (trail, [position]), False
        else:
            self._recomputed[1].append(position)

    def gradient_ready(self, unit: int) -> int:
        """Note that a gradient of ``unit`` is ready. Return how many are missing: < 0 if late."""
        if self._recomputed is not None and not self._is_recomputed_ready:
            trail, positions = self._recomputed
            self._is_recomputed_ready = unit in [trail.units[p] for p in positions]
        self._num_missing[unit] = missing = self._num_missing[unit] - 1
        return missing

    def ready_units(self) -> list[int]:
        """Return the units to be reduced now, each once."""
        order, first = self._order, self._next
        while self._next < len(order) and self._num_missing[order[self._next]] <= 0:
            self._next += 1
        return order[first : self._next]

    def skipped_last(self) -> Iterator[int]:
        """Yield the units between those that backward entered and the start of the forward."""
        trail = self._followed or next(reversed(self._trails), None)
        if trail is not None:
            self._leave_recomputed()
            yield from self._follow(trail, 0)

    def end_backward(self) -> list[int]:
        """End the backward and return the units that have not been ready in it."""
        rest, self._next = self._order[self._next :], 0
        return rest

    def forget(self) -> None:
        """End a step or drop its gradients. Forwards that wait for their backward stay."""
        self._next = 0
        self._recomputed = None
        self._trails = [trail for trail in self._trails if trail.is_pending]
        if not self._trails:
            self._without_grad.clear()
            self._with_grad.clear()

    @property
    def is_awaited(self) -> bool:
        """Whether a forward waits for its backward, as far as this rank can see."""
        return any(trail.is_pending for trail in self._trails)

    def _leave_recomputed(self) -> None:
        """Follow the trail to its start, if backward has gone through what was computed again."""
        if self._recomputed is not None and self._is_recomputed_ready:
            trail, positions = self._recomputed
            for _ in self._follow(trail, min(positions)):
                pass  # other ranks compute it again, too: nothing is gathered for it
            self._recomputed = None

    def _follow(self, trail: _Trail, stop: int) -> Iterator[int]:
        """Leave the units at positions >= ``stop``, and yield those that were never entered."""
        while len(trail.units) > stop:
            unit = trail.units.pop()
            was_passed = unit in trail.passed  # of an older forward, perhaps, it was entered
            trail.passed.discard(unit)
            if was_passed or unit not in self._entered:
                self._entered.add(unit)
                yield unit
            if self._num_missing.get(unit, 0) > 0 and unit not in trail.units:
                older = self._trails[: self._trails.index(trail)]
                if not any(unit in t.units for t in older if t.forward() is not None):
                    self._num_missing[unit] = 0


class Prefetch:
    """Units that are gathered ahead of one in use: its successors in the order of all ranks.

    Attributes:
        windows: these units, in order, by the one in use: in forward, and in backward.
        ahead: the unit in use when another one was gathered before it was needed, by the latter.
    """

    def __init__(self, num_units: int) -> None:
        self._num_units = num_units
        self.windows: tuple[dict[int, range], dict[int, range]] = ({}, {})
        for unit in range(num_units):
            self.set_depth(unit, 1, backward=False)
            self.set_depth(unit, 1, backward=True)
        self.ahead: dict[int, int] = {}

    def set_depth(self, unit: int, number: int, *, backward: bool) -> None:
        """Gather ``number`` units ahead of ``unit``, rather than one. All ranks set the same."""
        found = range(unit + 1, min(self._num_units, unit + 1 + number))
        if backward:
            found = range(unit - 1, max(0, unit - 1 - number), -1)
        self.windows[backward][unit] = found

    def enter(self, unit: int, *, backward: bool) -> tuple[range, list[int]]:
        """Enter ``unit``. Return its window, and units that were gathered ahead in vain.

        These are not in front of ``unit``: the order of use is not that of the module tree.
        """
        window = self.windows[backward][unit]
        strays = []
        if self.ahead:
            before, self.ahead = self.ahead, {}
            for other, origin in before.items():
                if (origin > unit > other) if backward else (origin < unit < other):
                    self.ahead[other] = origin
                elif other != unit and other not in window:
                    strays.append(other)
        return window, strays
