"""All units of a model: which are gathered, which are gathered ahead, which are released.

[Note: the tail]
Parameters that the module tree holds behind the blocks are most likely used after them; a tail has
at least `zero_core.layout.discovery.MIN_TAIL_NUMEL` of their elements. The gather of the tail is
launched with the root's, behind that of the first block, and waited for when forward leaves the
last block. It stays to the end of backward, as the root does. Whoever uses it earlier waits
earlier: a module that holds one of its parameters by a hook, other code by a read ([Note: access]
in `zero_core.core.access`).

[Note: publication]
At stages 1 and 2 every rank keeps all values, and a step leaves new ones in one slice on each. Once
the step is decided, `publish` launches the exchange of all units, in their order, on all ranks
alike, and waits for none: a unit's forward does, or the first read. So ranks may skip different
blocks, and nobody reads a value of before the step. A tier on the host is still updating then: each
launch follows the update of its unit, in a thread of its own (`Launcher`). No reduction, no other
exchange and no later update begins before `drain`: peers may still read the shards.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from zero_core.comm.communicator import Communicator
from zero_core.core.order import Prefetch
from zero_core.core.params import FlatParams, Launcher
from zero_core.core.saved import SavedWeights
from zero_core.core.unit import Unit
from zero_core.layout.arithmetic import Segment
from zero_core.object_methods import SuspendableHooks


class UnitSet:
    """Gathers and releases units. See the notes above.

    Attributes:
        units: the root first, then blocks in the order of the module tree, then the tail.
        has_sharded_params: whether gathered values are released after use (stage 3).
        ready: indices of the units whose parameters hold the current values. The tail is in it only
            once the forward under way has waited for it.
        current: the block in use.
        stay_gathered: indices of units that stay gathered after a forward.
        part_hooks: gather the block of a part that is called by itself. They are suspended while
            all blocks stay gathered: a forward for one token calls many small modules.
    """

    def __init__(
        self, units: Sequence[Unit], communicator: Communicator, *, has_sharded_params: bool
    ) -> None:
        self.units = tuple(units)
        self.blocks = tuple(unit for unit in units if unit.is_block)
        self.tail = units[-1] if units[-1].is_tail else None
        self.has_sharded_params = has_sharded_params
        self.ready: set[int] = set()
        self.current: Unit | None = None
        self.saved = SavedWeights()
        self.prefetch = Prefetch(len(units))
        self.stay_gathered: frozenset[int] = frozenset()
        self.part_hooks = SuspendableHooks()
        self._communicator = communicator
        self._opening_tail = threading.RLock()
        if self.tail is not None and has_sharded_params:
            for flat in self.tail.params:
                flat.await_tail = weakref.WeakMethod(self._await_tail)
        self._full_params_depth = 0  # within any `full_params`, nothing is released
        kept = [flat for unit in units for flat in unit.params if flat.is_kept]
        self._published = [flat for flat in kept if flat.is_exchanged]
        self._launcher: Launcher | None = None
        self._is_publishing = False  # not all that was launched has been waited for
        self._publishing = threading.RLock()
        for unit in units:
            for flat in unit.params:
                flat.publishing = self._publishing

    # ----------------------------------------------------------------- gather

    def go_to(self, unit: Unit, *, backward: bool) -> None:
        """Gather ``unit`` and its successors, and release its predecessor.

        Wait for ``unit`` if it is a block. Callers wait for the root, behind whose gather that of
        the first block and the tail's are launched, and for the tail.
        """
        index = unit.index
        if unit.is_block:
            previous, self.current = self.current or unit, unit
            if previous is not unit and (backward or previous.index not in self.stay_gathered):
                self.release(previous)
        window, strays = self.prefetch.enter(index, backward=backward)
        for stray in strays:
            if backward or stray not in self.stay_gathered:
                self.release(self.units[stray])
        if index not in self.ready:
            unit.gather(backward=backward)
        if unit.hints is not None:
            unit.hints.announce(index, backward=backward)
        if unit.is_block:
            self.wait(unit)
        for number in window:
            ahead = self.units[number]
            if number in self.ready:
                continue
            if not ahead.is_exchanged and not ahead.is_updated():
                continue  # it would block here until the tier has updated the unit
            if ahead.is_block:  # else it stays
                self.prefetch.ahead.append((index, number))
            ahead.gather(backward=backward)

    def launch_tail(self) -> None:
        """Launch the gather of the tail. Whoever reads it from now on waits."""
        tail = self.tail
        if tail is None or tail.index in self.ready:
            return
        if tail.is_exchanged or tail.is_updated():  # else whoever is first waits for the update
            tail.gather()
        for flat in tail.params:
            flat.defer()

    def open_tail(self) -> None:
        """Wait for the tail, as a forward does."""
        if self.tail is not None and self.tail.index not in self.ready:
            with self._opening_tail:
                self.tail.gather()
                self.wait(self.tail)

    def _await_tail(self) -> None:
        """Wait for the tail, whose gather was launched, in any thread that reads it."""
        with self._opening_tail:
            assert self.tail is not None, "its parameter was read"
            if any(flat.is_deferred for flat in self.tail.params):  # else it is released again
                self.open_tail()

    def gather_exact(self, unit: Unit) -> None:
        """Gather ``unit`` now, unquantized. One that is gathered stays: quantized, perhaps."""
        if unit.index not in self.ready:
            unit.gather(exact=True)
            self.wait(unit)

    def wait(self, unit: Unit) -> None:
        """Wait for ``unit``, which is being gathered."""
        if unit.index in self.ready:
            return
        for flat in unit.params:
            flat.wait()
            if self.has_sharded_params and not flat.is_kept:
                self.saved.add(unit, flat)
        self.ready.add(unit.index)

    # ---------------------------------------------------------------- release

    def release(self, unit: Unit) -> None:
        """Release the gathered values of ``unit``, outside of `full_params`."""
        if not self.has_sharded_params or self._full_params_depth:
            return
        if unit is self.current:
            self.current = None
        if not self.part_hooks.handles:
            self.part_hooks.resume()
        self.ready.discard(unit.index)
        for flat in unit.params:
            if flat.full is not None and not flat.is_kept:
                self.saved.gathered.pop(flat.full.data_ptr(), None)
            flat.release()

    def release_resharded(self) -> None:
        """Release every unit that does not stay after a forward without gradients."""
        self.release_all(self.stay_gathered)
        if self.stay_gathered and self.stay_gathered & self.ready >= {
            unit.index for unit in self.blocks
        }:
            self.part_hooks.suspend()

    def release_all(self, stays: frozenset[int] = frozenset()) -> None:
        """Release every unit but those that ``stays`` has, the root and the tail included."""
        self.saved.release_references()
        self.current = self.saved.entered = None
        self.prefetch.ahead.clear()
        for unit in self.units:
            if unit.index not in stays:
                self.release(unit)

    def set_stay_gathered(self, units: frozenset[int]) -> None:
        """Keep ``units``, by index, gathered after a forward, until a backward or `release_all`.

        Every rank must set the same ones, between two forwards. Others that were among them are
        released.
        """
        left, self.stay_gathered = self.stay_gathered - units, units
        for index in sorted(left):
            self.release(self.units[index])

    @contextmanager
    def full_params(self) -> Iterator[None]:
        """Release nothing that is gathered within. Contexts may end in any order."""
        self._full_params_depth += 1
        try:
            yield
        finally:
            self._full_params_depth -= 1
            if not self._full_params_depth:
                self.release_all()

    @property
    def has_full_params(self) -> bool:
        return self._full_params_depth > 0

    def vacate(self) -> None:
        """Make all parameters placeholders until `FlatParams.reoccupy`. Nothing is under way."""
        for unit in self.units:
            for flat in unit.params:
                flat.vacate()
        self.saved.forget_range()
        self.ready.clear()

    # ----------------------------------------------------------------- values

    def updated_early(self, segment: Segment) -> None:
        """Note that the state tier has updated a segment in backward."""
        for flat in self.units[segment.unit].params:
            if flat.segment is segment:
                flat.updated_early()
        self.ready.discard(segment.unit)

    def values_changed(self, flats: Iterable[FlatParams] | None = None) -> None:
        """Note that shards, those of ``flats`` or all, hold new values, and publish them.

        Every rank must call it.
        """
        with self._publishing:
            if not self.part_hooks.handles:
                self.part_hooks.resume()
            if flats is None:
                self.ready.clear()
                flats = [flat for unit in self.units for flat in unit.params]
            for flat in flats:
                if flat.full is not None:  # a forward may have left old values in it
                    self.release(self.units[flat.segment.unit])
                self.ready.discard(flat.segment.unit)
                flat.invalidate()
            self.publish()

    def values_replaced(self, flats: Iterable[FlatParams] | None = None) -> None:
        """Do as `values_changed` for values that were written from outside of a step."""
        self._communicator.forget_values()
        self.values_changed(flats)

    def publish(self) -> None:
        """Launch the exchange of kept values that have changed, and wait for none.

        Every rank must call it. See [Note: publication].
        """
        stale = [flat for flat in self._published if not flat.is_gather_launched]
        if not stale:
            return
        launcher = None
        if not all(flat.source.is_updated() for flat in stale):
            if self._launcher is None:
                self._launcher = Launcher(stale[0].device)
            launcher = self._launcher
            launcher.begin()
        for flat in stale:
            flat.publish(launcher)
        self._is_publishing = True

    def drain(self) -> None:
        """Wait for all that was published."""
        if self._is_publishing:
            for flat in self._published:
                flat.finish_gather()
            self._is_publishing = False
