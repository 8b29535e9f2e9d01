"""Order in which units are gathered, and in which they are reduced in a backward.

Units are numbers here: 0 is the root, then blocks in the order of the module tree, then the tail,
if there is one.

[Note: order of reductions]
Units are reduced in the reverse order of the module tree, the root last, whatever order gradients
become ready in, so that every rank launches the same reductions in the same order. A unit is
*complete* when each gradient that is required is ready, or when backward has *left* it for good.
Where the branch of a rank left a parameter out, its gradient never becomes ready. Waiting to the
end of backward would do for the numbers, but at stage 3 a peer that waits for the reduction gathers
nothing, and this rank needs its shards to reach that end.
A gradient that is ready after its unit was complete is *late*, and reduced in a second round.

[Note: one order for gathers and reductions]
A rank that knows only when it leaves a unit that a gradient does not come launches its reduction
then, before it gathers anything more. On the other ranks it was launched when the last gradient was
ready, which is between the same two gathers. So the order of all launches, over both communicators,
is one on all ranks, branches or not. NCCL asks for that where communicators may share a hardware
queue.

[Note: place of the tail]
The tail's gradients should come before those of all blocks, and then it is reduced first. Where it
has a parameter that is not used, or that the blocks use too, that would keep every other unit
waiting. So it is reduced between the blocks and the root, until a step has shown on all ranks that
its gradients were complete before any block's were; and again after a step that showed otherwise.
The ranks agree on that with the step's statistics.

[Note: trails]
A forward leaves a *trail*, the units in the order in which it used them; backward follows it from
its end to its start. Units behind are left, unless an older forward that is still alive used them
too (two losses, one backward). Activation checkpointing computes several units again, in the order
of forward, before backward goes through the last of them: what is recomputed is followed only once
a gradient of it is ready.
A unit that backward passes over (it returned its input, say) is *skipped*: other ranks may need it,
and this rank gathers it in the same order.

[Note: blocks that need no gradient]
Backward does not go into a block whose output needs no gradient, as below the first trainable one.
At stage 3 it is not gathered either, if that was so on all ranks in the step before: they agree on
that with the step's statistics. Until then, and where it is so on some ranks alone, it counts as a
unit that backward skips, and all ranks gather it.

[Note: one backward through several engines]
Where a rank's branch leaves out what another rank's backward goes through, each would wait for the
other in collectives of two engines. Autograd goes backward in the reverse order of forward, through
several engines too, so the uses of all engines of the same ranks are one trail, by time. A rank
that enters a unit of one engine first follows the others' trails down to it, and ends the backward
of an engine that it has left. Which engines a backward goes through at all is seen from its graph
alone: the ranks vote on each engine that has a forward waiting, when they enter it or pass it, in
the same order on all ranks. One that any rank enters is gone through on all. A backward while no
second engine waits has no vote.
"""

from __future__ import annotations

import weakref
from bisect import bisect
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import count
from typing import Protocol

_NUM_KEPT = 16
"""Trails kept of forwards of which no saved weight is left; those of recomputed units are."""


_time = count(1)
"""Numbers the uses of units by all engines of this process."""


class Forward:
    """A token for one forward of the model, alive while a weight that it saved is."""

    __slots__ = ("__weakref__",)


class _Trail:
    """Units that a forward used. See [Note: trails].

    Attributes:
        forward: a weak reference to it.
        units: those that backward has not reached yet, in forward order.
        times: of their uses.
        began: when the forward began.
        is_pending: whether no backward has begun since the forward did.
        has_ended: whether the forward has, without an error.
    """

    def __init__(self, forward: Forward) -> None:
        self.forward = weakref.ref(forward)
        self.units: list[int] = []
        self.times: list[int] = []
        self.began = next(_time)
        self.is_pending = True
        self.has_ended = False

    def add(self, unit: int) -> None:
        self.units.append(unit)
        self.times.append(next(_time))

    def pop(self) -> int:
        self.times.pop()
        return self.units.pop()

    def last_position(self, unit: int) -> int | None:
        """Return the position at which backward reaches ``unit`` next."""
        for position in range(len(self.units) - 1, -1, -1):
            if self.units[position] == unit:
                return position
        return None


class BackwardOrder:
    """Order of reductions and gathers. See the notes above."""

    def __init__(
        self, trainable: Sequence[int], tail: int | None = None, *, is_alone: bool = True
    ) -> None:
        """``trainable``: the units that have gradients, ascending. ``tail`` may be among them.

        ``is_alone``: no other rank gathers with this one, so it agrees with none on what to leave
        out.
        """
        self._blocks = [unit for unit in reversed(trainable) if unit not in (0, tail)]
        self._root = [unit for unit in trainable if unit == 0]
        self._tail = [unit for unit in trainable if unit == tail]
        self._is_alone = is_alone
        # See [Note: blocks that need no gradient].
        self._without_grad: set[int] = set()
        self._with_grad: set[int] = set()
        self._left_out: frozenset[int] = frozenset()
        self._is_tail_late = False  # in this step, on this rank
        self.place_tail(is_first=False)
        self._next = 0  # into _order
        self._num_missing: dict[int, int] = {}  # gradients that are not ready, by unit
        self._trails: list[_Trail] = []
        self._awaited: list[_Trail] = []  # those that were pending when this backward began
        self._followed: _Trail | None = None  # in this backward, last
        self._entered: set[int] = set()  # in this backward
        # What is being computed again: which positions of which trail; whether a gradient of it is
        # ready.
        self._recomputed: tuple[_Trail, list[int]] | None = None
        self._is_recomputed_ready = False

    @property
    def is_tail_late(self) -> bool:
        """Whether a block's gradients were complete before the tail's, in this step."""
        return self._is_tail_late

    def place_tail(self, *, is_first: bool) -> None:
        """Reduce the tail before the blocks in the following steps, or behind them.

        Every rank must call it, between two backwards.
        """
        middle = [*self._tail, *self._blocks] if is_first else [*self._blocks, *self._tail]
        self._order = [*middle, *self._root]

    # ---------------------------------------------------------------- forward

    def begin_forward(self) -> Forward:
        """Begin a forward with gradients. What it saves must hold the result."""
        forward = Forward()
        old = self._trails[:-_NUM_KEPT]  # where nobody steps, they would pile up
        self._trails = [t for t in old if t.forward() is not None] + self._trails[-_NUM_KEPT:]
        self._trails.append(_Trail(forward))
        self._followed = None
        return forward

    def end_forward(self) -> None:
        """Note that the forward that began last has ended without an error."""
        if self._trails:
            self._trails[-1].has_ended = True

    def use(self, unit: int) -> None:
        """Note that the forward that began last went into ``unit``."""
        if self._trails:
            trail = self._trails[-1]
            if not trail.units or trail.units[-1] != unit:
                trail.add(unit)

    def leave(self, block: int, *, needs_grad: bool) -> None:
        """Note whether the output of ``block``, in the forward that began last, needs a gradient.

        If not, backward may leave it out: see [Note: blocks that need no gradient].
        """
        if needs_grad:
            self._with_grad.add(block)
            return
        self._without_grad.add(block)
        if (self._is_alone or block in self._left_out) and self._trails:
            trail = self._trails[-1]
            if trail.units and trail.units[-1] == block:
                trail.pop()

    @property
    def left_out(self) -> frozenset[int]:
        """Blocks that all ranks leave out in this step."""
        return self._left_out

    @property
    def unneeded(self) -> frozenset[int]:
        """Blocks that needed no gradient on this rank, in any forward of this step."""
        return frozenset(self._without_grad - self._with_grad)

    def leave_out(self, *, is_agreed: bool) -> None:
        """Leave out the `unneeded` blocks in the next step, if they are the same on all ranks."""
        self._left_out = self.unneeded if is_agreed else frozenset()

    # --------------------------------------------------------------- backward

    def begin_backward(self, num_missing: Mapping[int, int]) -> None:
        """Begin a backward, which brings so many gradients of each unit."""
        self._awaited = [trail for trail in self._trails if trail.is_pending]
        for trail in self._awaited:
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
        trail = self._trail_of(unit, forward)
        if trail is None or trail.last_position(unit) is None:
            return
        self._followed = trail
        self._leave_recomputed()
        position = trail.last_position(unit)
        if position is None:
            return
        if forward is not None:
            self._recomputed = None
            yield from self._follow(trail, position + 1)
        elif self._recomputed is None or self._recomputed[0] is not trail:
            self._recomputed, self._is_recomputed_ready = (trail, [position]), False
        else:
            self._recomputed[1].append(position)

    def gradient_ready(self, unit: int) -> int:
        """Note that a gradient of ``unit`` is ready.

        Returns:
            How many are missing; below 0 if it is late.
        """
        if self._recomputed is not None and not self._is_recomputed_ready:
            trail, positions = self._recomputed
            self._is_recomputed_ready = unit in [trail.units[p] for p in positions]
        self._num_missing[unit] = missing = self._num_missing[unit] - 1
        if missing == 0 and unit != 0 and unit not in self._tail:
            self._note_late_tail()
        return missing

    def ready_units(self) -> Iterator[int]:
        """Yield the units to be reduced now, each once."""
        order = self._order
        while self._next < len(order) and self._num_missing[order[self._next]] <= 0:
            self._next += 1
            yield order[self._next - 1]

    def time_of(self, unit: int, forward: Forward | None) -> int:
        """Return when ``unit`` was used that `enter` would enter, 0 if it is on no trail."""
        trail = self._trail_of(unit, forward)
        position = None if trail is None else trail.last_position(unit)
        return 0 if trail is None or position is None else trail.times[position]

    @property
    def last_use(self) -> int:
        """Time of the last use that backward has not reached, 0 if there is none.

        A forward that waits and used no unit counts from its beginning.
        """
        trail = self._newest()
        if trail is None:
            return 0
        return trail.times[-1] if trail.times else trail.began * trail.is_pending

    @property
    def is_followed(self) -> bool:
        """Whether backward has reached all units of the forwards that waited for it."""
        return not any(trail.units for trail in self._awaited)

    def skipped(self, since: int = 0) -> Iterator[int]:
        """Yield the units used after ``since`` that backward has not entered, the last one first.

        By default these are all between those that it entered and the start of the forward.
        """
        trail = self._newest()
        if trail is not None:
            self._leave_recomputed()
            yield from self._follow(trail, bisect(trail.times, since))

    def _newest(self) -> _Trail | None:
        return self._followed or next(reversed(self._trails), None)

    def end_backward(self) -> list[int]:
        """End the backward and return the units that have not been ready in it."""
        self._note_late_tail()
        rest, self._next = self._order[self._next :], 0
        return rest

    def forget(self) -> None:
        """End a step or drop its gradients. Forwards that wait for their backward stay."""
        self._next = 0
        self._recomputed = None
        self._is_tail_late = False
        self._trails = [trail for trail in self._trails if trail.is_pending]
        if not self._trails:
            self._without_grad.clear()
            self._with_grad.clear()

    @property
    def is_awaited(self) -> bool:
        """Whether a forward waits for its backward, as far as this rank can see."""
        return any(trail.is_pending for trail in self._trails)

    @property
    def is_due(self) -> bool:
        """Whether a forward that has ended waits for its backward."""
        return any(trail.is_pending and trail.has_ended for trail in self._trails)

    def _note_late_tail(self) -> None:
        if any(self._num_missing.get(unit, 0) > 0 for unit in self._tail):
            self._is_tail_late = True

    def _trail_of(self, unit: int, forward: Forward | None) -> _Trail | None:
        for trail in reversed(self._trails):
            is_it = unit in trail.units if forward is None else trail.forward() is forward
            if is_it:
                return trail
        return None

    def _leave_recomputed(self) -> None:
        """Follow the trail to its start, if backward has gone through what was computed again."""
        if self._recomputed is not None and self._is_recomputed_ready:
            trail, positions = self._recomputed
            for _ in self._follow(trail, min(positions)):
                pass  # other ranks compute it again, too: nothing is gathered for it
            self._recomputed = None

    def _follow(self, trail: _Trail, stop: int) -> Iterator[int]:
        """Mark the units at positions >= ``stop`` of the trail as finished, one by one.

        Yields each that backward never entered, before it is marked.
        """
        older: list[_Trail] | None = None
        while len(trail.units) > stop:
            unit = trail.pop()
            if unit not in self._entered:
                self._entered.add(unit)
                yield unit
            if self._num_missing.get(unit, 0) > 0 and unit not in trail.units:
                if older is None:
                    older = self._trails[: self._trails.index(trail)]
                if not any(unit in t.units for t in older if t.forward() is not None):
                    self._is_tail_late |= unit in self._tail
                    self._num_missing[unit] = 0


class SharingEngine(Protocol):
    """An engine in a backward through several. `zero_core.runtime.runtime.Runtime` is the one."""

    @property
    def is_due(self) -> bool:
        """Whether a forward waits for a backward in which this rank waits for others."""

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward of the engine is open."""

    @property
    def last_use(self) -> int:
        """See `BackwardOrder.last_use`."""

    def vote(self, *, is_entered: bool) -> bool:
        """Return whether the backward of any rank enters the engine. Every rank must call it."""

    def follow_to(self, time: int) -> None:
        """Go backward through the units used after ``time``, as one that skips them."""


class SharedBackward:
    """Order of several engines of the same ranks in one backward. See the note at the top."""

    def __init__(self) -> None:
        self._all: list[weakref.ref[SharingEngine]] = []
        self._engines: list[SharingEngine] = []  # in the backward under way, if it is shared
        self._undecided: list[SharingEngine] = []  # of these

    def add(self, engine: SharingEngine) -> None:
        """Add an engine, held weakly."""
        self._all = [ref for ref in self._all if ref() is not None]
        self._all.append(weakref.ref(engine))

    def remove(self, engine: SharingEngine) -> None:
        self._all = [ref for ref in self._all if ref() not in (None, engine)]
        self.forget()

    @property
    def is_under_way(self) -> bool:
        """Whether a backward is under way for which forwards of several engines have waited."""
        return bool(self._engines)

    def begin(self, engine: SharingEngine) -> bool:
        """Begin the backward of ``engine``, after those of engines that are used later.

        Returns:
            Whether a shared backward began with it. `end` must be called at its end.
        """
        is_first = not self._engines
        if is_first:
            alive = [found for ref in self._all if (found := ref()) is not None]
            waiting = [found for found in alive if found.is_due]
            if len(waiting) < 2:
                return False
            self._engines, self._undecided = waiting, list(waiting)
        self.enter(engine, engine.last_use)
        self._is_entered(engine, here=True)
        return is_first

    def enter(self, engine: SharingEngine | None, time: int) -> None:
        """Follow the other engines' trails, before a unit of ``engine`` used at ``time``."""
        while behind := [
            other
            for other in self._engines
            if other is not engine and other.last_use > time
            if other.is_in_backward or other in self._undecided
        ]:
            last, *others = sorted(behind, key=lambda other: other.last_use, reverse=True)
            if self._is_entered(last, here=False):
                last.follow_to(max([time, *(other.last_use for other in others)]))

    def _is_entered(self, engine: SharingEngine, *, here: bool) -> bool:
        if engine in self._undecided:
            self._undecided.remove(engine)
            return engine.vote(is_entered=here)
        return True

    def end(self) -> None:
        """End the backward of all engines that take part."""
        self.enter(None, 0)
        self.forget()

    def forget(self) -> None:
        """Note that no shared backward is under way: it has ended, or been interrupted."""
        self._engines = []
        self._undecided = []


_shared: weakref.WeakValueDictionary[Hashable, SharedBackward] = weakref.WeakValueDictionary()


def shared_backward(ranks: Hashable) -> SharedBackward:
    """Return the one of all engines of ``ranks`` in this process."""
    return _shared.setdefault(ranks, SharedBackward())


class Prefetch:
    """Units that are gathered ahead of one in use: its successors in the order of all ranks."""

    def __init__(self, num_units: int) -> None:
        self._num_units = num_units
        self._depths: tuple[dict[int, int], dict[int, int]] = ({}, {})  # forward, backward
        self._entered = 0
        # Units gathered before they are needed, each with the one in use then.
        self._ahead: list[tuple[int, int]] = []

    def set_depth(self, unit: int, number: int, *, backward: bool) -> None:
        """Gather ``number`` units ahead of ``unit``, rather than one. All ranks set the same."""
        self._depths[backward][unit] = number

    def enter(self, unit: int, *, backward: bool) -> tuple[range, list[int]]:
        """Enter ``unit``.

        Returns:
            The units to gather ahead, in order, and those that were gathered ahead and are not in
            front of it: the order of use is not that of the module tree.
        """
        depth = self._depths[backward].get(unit, 1)
        if backward:
            window = range(unit - 1, max(0, unit - 1 - depth), -1)
        else:
            window = range(unit + 1, min(self._num_units, unit + 1 + depth))
        strays = []
        if self._ahead:
            ahead, self._ahead = self._ahead, []
            for origin, other in ahead:
                if (origin > unit > other) if backward else (origin < unit < other):
                    self._ahead.append((origin, other))
                elif other != unit and other not in window:
                    strays.append(other)
        self._entered = unit
        return window, strays

    def add(self, unit: int) -> None:
        """Note that ``unit`` has been gathered ahead of the one that was entered."""
        self._ahead.append((self._entered, unit))

    def clear(self) -> None:
        """Note that what was gathered ahead has been released."""
        self._ahead.clear()
