"""Order in which backward gathers units again and reduces their gradients.

Units are numbers here: 0 is the root, then blocks in the order of the module tree, then the tail.

[Note: order of reductions]
Blocks are reduced in the reverse order of the module tree, then the tail, then the root, in
whatever order gradients become ready. So all ranks launch the same reductions in the same order. A
unit is *complete* when each required gradient is ready, or when backward has *left* the unit for
good. The second case occurs when a rank's branch does not use a parameter, whose gradient is then
never ready. (Waiting for the end of backward would give the same numbers, but deadlock at stage 3:
a peer that waits for the reduction gathers nothing, while this rank needs the peer's shards to end
backward.) A gradient that is ready after its unit was complete is *late*, and reduced in a second
round.

[Note: one order for gathers and reductions]
A rank that leaves a unit without all of its gradients launches the unit's reduction before its next
gather. The other ranks launch the reduction when the last gradient is ready, between the same two
gathers. So all ranks launch gathers and reductions in one order, whatever branches they take. NCCL
requires this where communicators may share a hardware queue.

[Note: trails]
A forward records a *trail*, the units in the order of use. Backward follows the trail from its end
to its start. Backward has left the units after its position, unless an older, unfinished forward
used them too (two losses, one backward). Activation checkpointing recomputes several units in
forward order before backward reaches the last of them. The position then changes only when a
gradient of one of these units is ready. A unit that backward does not enter (because it returned
its input, say) is *skipped*. Other ranks may need the unit, so this rank gathers it in the same
order. A block that the forward prefetched but did not use is *passed by*: it is also in the trail,
and backward skips it. All ranks must run the same blocks within a checkpoint of several blocks, and
in a backward that recomputes blocks for several forwards.

[Note: blocks that need no gradient]
Backward does not enter a block whose output needs no gradient, such as one below the first
trainable block. At stage 3 the block is not gathered either, if all ranks agreed in the previous
step that it needs none. Otherwise backward treats it as skipped, and all ranks gather it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_NUM_KEPT = 16
"""Number of newest trails kept even if no saved weight is alive, as blocks may be recomputed."""


class Forward:
    """Token for one forward of the model, alive while a weight saved by the forward is alive."""

    __slots__ = ("__weakref__",)


@dataclass(eq=False, slots=True)
class _Trail:
    forward: weakref.ref[Forward]
    units: list[int] = field(default_factory=list)  # not reached by backward, in forward order
    passed: set[int] = field(default_factory=set)  # units in ``units`` that were passed by
    is_pending: bool = True  # no backward has begun since the forward


def _last_position(units: Sequence[int], unit: int) -> int | None:
    """Return the position at which backward next reaches ``unit``, or None."""
    for position in range(len(units) - 1, -1, -1):
        if units[position] == unit:
            return position
    return None


class BackwardOrder:
    """Order of reductions and gathers in backward. See the module's notes."""

    def __init__(self, trainable: Sequence[int], tail: int | None, *, is_alone: bool) -> None:
        """``trainable``: units with gradients. ``is_alone``: gathers involve no other rank."""
        # Blocks in reverse, then the tail, then the root. The tail's gradients are usually ready
        # first. But if the tail is unused, or also used by the blocks, it would delay all other
        # units.
        self._order = sorted(trainable, key=lambda unit: (unit == 0, unit == tail, -unit))
        self._is_alone = is_alone
        # See [Note: blocks that need no gradient].
        self._without_grad: set[int] = set()
        self._with_grad: set[int] = set()
        self.left_out: frozenset[int] = frozenset()  # blocks that backward needs on no rank
        self._next = 0  # index into _order
        self._num_missing: dict[int, int] = {}  # by unit: number of gradients not ready
        self._trails: list[_Trail] = []
        self._followed: _Trail | None = None  # the trail followed last in this backward
        self._entered: set[int] = set()  # units entered in this backward
        # A trail and the positions of its recomputed units, and whether backward has gone through
        # them: a gradient of one of the units is ready, or a unit before all of them is recomputed.
        self._recomputed: tuple[_Trail, list[int]] | None = None
        self._is_recomputed_ready = False

    def begin_forward(self) -> Forward:
        """Begin a forward with gradients. Weights saved for backward must reference the result."""
        forward = Forward()
        old = self._trails[:-_NUM_KEPT]  # without steps, old trails would accumulate
        self._trails = [t for t in old if t.forward() is not None] + self._trails[-_NUM_KEPT:]
        self._trails.append(_Trail(weakref.ref(forward)))
        return forward

    def use(self, unit: int) -> None:
        """Note that the newest forward entered ``unit``."""
        if self._trails:
            trail = self._trails[-1]
            if unit in trail.passed:
                trail.passed.remove(unit)
                trail.units.remove(unit)
            if not trail.units or trail.units[-1] != unit:
                trail.units.append(unit)

    def pass_by(self, block: int) -> None:
        """Note that the newest forward passed ``block`` by, which other ranks may use."""
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
        """Blocks that needed no gradient on this rank in any forward of this step."""
        return frozenset(self._without_grad - self._with_grad)

    def begin_backward(self, num_missing: Mapping[int, int]) -> None:
        """Begin a backward. ``num_missing``: number of gradients expected for each unit."""
        for trail in self._trails:
            trail.is_pending = False
        self._followed = None
        self._entered.clear()
        self._num_missing = {unit: num_missing[unit] for unit in self._order}
        self._recomputed = None
        self._next = 0

    def enter(self, unit: int, forward: Forward | None) -> Iterator[int]:
        """Enter ``unit`` in the backward of ``forward``, or, if None, to recompute the unit.

        Yields each unit that backward has skipped, before that unit counts as complete.
        """
        self._entered.add(unit)
        trails = reversed(self._trails)
        if forward is None:
            found = (t for t in trails if unit in t.units and unit not in t.passed)
        else:
            found = (t for t in trails if t.forward() is forward)
        trail = next(found, None)
        position = None if trail is None else _last_position(trail.units, unit)
        if trail is None or position is None:
            return
        self._followed = trail
        if forward is None:
            self._with_grad.add(unit)  # a reentrant checkpoint's forward runs without gradients
            if self._recomputed is not None and self._recomputed[0] is trail:
                # A checkpoint recomputes its units in forward order. A unit before all recomputed
                # ones therefore belongs to another checkpoint, and backward has finished with the
                # recomputed ones. If these have no trainable parameter, nothing else shows this.
                again = {trail.units[p] for p in self._recomputed[1]}
                first = min(i for i, used in enumerate(trail.units) if used in again)
                self._is_recomputed_ready |= position < first
        if self._recomputed is not None:
            self._leave_recomputed()
            position = _last_position(trail.units, unit)
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
        """Note that a gradient of ``unit`` is ready.

        Returns how many gradients are missing: negative if this one is late.
        """
        if self._recomputed is not None and not self._is_recomputed_ready:
            trail, positions = self._recomputed
            self._is_recomputed_ready = unit in [trail.units[p] for p in positions]
        self._num_missing[unit] = missing = self._num_missing[unit] - 1
        return missing

    def ready_units(self) -> list[int]:
        """Return the units to reduce now, in order. No unit is returned twice in a backward."""
        order, first = self._order, self._next
        while self._next < len(order) and self._num_missing[order[self._next]] <= 0:
            self._next += 1
        return order[first : self._next]

    def skipped_last(self) -> Iterator[int]:
        """Yield the skipped units between the last entered unit and the start of the forward."""
        trail = self._followed or next(reversed(self._trails), None)
        if trail is not None:
            self._leave_recomputed()
            yield from self._follow(trail, 0)

    def end_backward(self) -> list[int]:
        """End the backward. Return the units that `ready_units` has not returned, in order."""
        rest, self._next = self._order[self._next :], 0
        return rest

    def forget(self) -> None:
        """Forget the current step, except trails of forwards whose backward has not begun."""
        self._next = 0
        self._recomputed = None
        self._trails = [trail for trail in self._trails if trail.is_pending]
        if not self._trails:
            self._without_grad.clear()
            self._with_grad.clear()

    @property
    def is_awaited(self) -> bool:
        """Whether a forward awaits its backward, as far as this rank knows."""
        return any(trail.is_pending for trail in self._trails)

    def _leave_recomputed(self) -> None:
        """Follow the trail through the recomputed units, if backward has finished with them."""
        if self._recomputed is not None and self._is_recomputed_ready:
            trail, positions = self._recomputed
            for _ in self._follow(trail, min(positions)):
                pass  # other ranks recompute the unit too, so it is not gathered
            self._recomputed = None

    def _follow(self, trail: _Trail, stop: int) -> Iterator[int]:
        """Mark units at positions >= ``stop`` as left. Yield those that backward has skipped."""
        while len(trail.units) > stop:
            unit = trail.units.pop()
            was_passed = unit in trail.passed  # ``unit`` may have been entered for an older forward
            trail.passed.discard(unit)
            if was_passed or unit not in self._entered:
                self._entered.add(unit)
                yield unit
            if self._num_missing.get(unit, 0) > 0 and unit not in trail.units:
                older = self._trails[: self._trails.index(trail)]
                if not any(unit in t.units for t in older if t.forward() is not None):
                    self._num_missing[unit] = 0
