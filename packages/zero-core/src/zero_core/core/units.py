"""All units of a model: when they are gathered, prefetched and released.

[Note: the tail]
The tail is a unit of parameters that follow the blocks in the module tree, and are most likely used
after them. It exists only if it has at least `zero_core.layout.discovery.MIN_TAIL_NUMEL` elements.
At stage 3 its gather is launched after those of the root and the first block, and awaited when
forward leaves the last block. Like the root, the tail stays gathered until backward ends. If it is
used earlier, a hook waits when a module with a tail parameter is called, and other code waits when
it reads a tail parameter ([Note: access] in `zero_core.core.access`).

[Note: publication]
At stages 1 and 2 every rank keeps all values, and a step updates one slice on each rank. After the
decision on a step, `publish` launches the exchanges of all changed units, in the same order on all
ranks. A unit's forward, or the first read of a parameter, waits for the unit's exchange. So ranks
may skip different blocks, and a read of a parameter returns its current value. If a host tier is
still updating, a separate thread (`Launcher`) launches each exchange after the unit's update. A
backward and a step first call `drain`, because peers may still read the shards.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from zero_core.comm.communicator import Communicator
from zero_core.core.extension import Extensions
from zero_core.core.params import FlatParams, Launcher
from zero_core.core.saved import SavedWeights
from zero_core.core.unit import Unit
from zero_core.layout.arithmetic import Segment
from zero_core.object_methods import SuspendableHooks


class UnitSet:
    """All units of a model, with methods that gather and release them. See the module's notes.

    Attributes:
        units: the root, then blocks in the order of the module tree, then the tail, if any.
        has_sharded_params: whether gathered values are released after use (stage 3).
        ready: indices of the units that `wait` has made readable and whose values are current.
        current: the block in use.
        windows: (forward, backward): indices of the units to gather ahead, by index of the unit in
            use.
        stay_gathered: indices of units that stay gathered after a forward.
        part_hooks: hooks that gather a block when one of its submodules is called directly.
            Suspended while all blocks stay gathered, to save their time in forwards for one token.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        communicator: Communicator,
        extensions: Extensions,
        *,
        has_sharded_params: bool,
    ) -> None:
        self.units = tuple(units)
        self.tail = units[-1] if units[-1].is_tail else None
        self.has_sharded_params = has_sharded_params
        self.ready: set[int] = set()
        self.current: Unit | None = None
        self.saved = SavedWeights()
        self.windows: tuple[dict[int, range], dict[int, range]] = ({}, {})
        # Blocks gathered ahead and not used yet: (index of the unit then in use, block's index).
        self._ahead: list[tuple[int, int]] = []
        depth = 1 if has_sharded_params else 0  # otherwise `publish` launches all gathers
        for unit in units:
            self.set_depth(unit.index, depth, backward=False)
            self.set_depth(unit.index, depth, backward=True)
        self.stay_gathered: frozenset[int] = frozenset()
        self.part_hooks = SuspendableHooks()
        self._communicator = communicator
        self._extensions = extensions
        self._opening_tail = threading.RLock()
        if self.tail is not None and has_sharded_params:
            for flat in self.tail.params:
                flat.await_tail = weakref.WeakMethod(self._await_tail)
        self._full_params_depth = 0  # number of open `full_params` contexts
        kept = [flat for unit in units for flat in unit.params if flat.is_kept]
        self._published = [flat for flat in kept if flat.is_exchanged]
        self._launcher: Launcher | None = None
        self._is_publishing = False  # whether `publish` has launched exchanges since `drain`
        self._publishing = threading.RLock()
        for unit in units:
            for flat in unit.params:
                flat.publishing = self._publishing

    @property
    def blocks(self) -> tuple[Unit, ...]:
        return tuple(unit for unit in self.units if unit.is_block)

    def set_depth(self, index: int, number: int, *, backward: bool) -> None:
        """Set how many units to gather ahead of unit ``index``. Every rank must set the same."""
        found = range(index + 1, min(len(self.units), index + 1 + number))
        if backward:
            found = range(index - 1, max(0, index - 1 - number), -1)
        self.windows[backward][index] = found

    def go_to(self, unit: Unit, *, backward: bool) -> None:
        """Gather ``unit`` and its window, and release the block used before (unless it stays).

        Waits for ``unit`` if it is a block. For the root and the tail the caller waits, because it
        first launches other gathers.
        """
        index = unit.index
        if unit.is_block:
            previous, self.current = self.current or unit, unit
            if previous is not unit and (backward or previous.index not in self.stay_gathered):
                self.release(previous)
        window = self.windows[backward][index]
        for entry in [*self._ahead]:
            origin, other = entry
            if (origin > index > other) if backward else (origin < index < other):
                continue
            # A block that is not used next: the model leaves the order of the module tree.
            is_next = other == index or other in window
            if not is_next and (backward or other not in self.stay_gathered):
                self.release(self.units[other])
            self._ahead.remove(entry)
        if index not in self.ready:
            self.gather(unit, backward=backward)
        if unit.hints is not None:
            unit.hints.announce(index, backward=backward)
        if unit.is_block:
            self.wait(unit)
        for number in window:
            ahead = self.units[number]
            if number in self.ready:
                continue
            if not ahead.is_exchanged and not ahead.is_updated():
                continue  # gathering would block until the tier has updated the unit
            if ahead.is_block:  # only blocks are released if not used next
                self._ahead.append((index, number))
            self.gather(ahead, backward=backward)

    def gather(self, unit: Unit, *, exact: bool = False, backward: bool = False) -> None:
        """Start to gather ``unit``, unless it is gathered: see `FlatParams.gather`."""
        for flat in unit.params:
            flat.gather(exact=exact, backward=backward)

    def launch_tail(self) -> None:
        """Launch the gather of the tail. Until `open_tail`, reads of its parameters wait."""
        tail = self.tail
        if tail is None or tail.index in self.ready:
            return
        if tail.is_exchanged or tail.is_updated():  # a local gather must not wait for an update
            self.gather(tail)
        for flat in tail.params:
            flat.defer()

    def open_tail(self) -> None:
        """Gather the tail unless it is gathered, and wait for it."""
        if self.tail is not None and self.tail.index not in self.ready:
            with self._opening_tail:
                self.gather(self.tail)
                self.wait(self.tail)

    def _await_tail(self) -> None:
        """Wait for the tail's gather. Called by any thread that reads a parameter of the tail."""
        with self._opening_tail:
            assert self.tail is not None, "its parameter was read"
            if any(flat.is_deferred for flat in self.tail.params):  # unless released meanwhile
                self.open_tail()

    def gather_exact(self, unit: Unit) -> None:
        """Gather ``unit`` without quantization. Does nothing if it is already gathered."""
        if unit.index not in self.ready:
            self.gather(unit, exact=True)
            self.wait(unit)

    def wait(self, unit: Unit) -> None:
        if unit.index in self.ready:
            return
        for flat in unit.params:
            flat.wait()
            if self.has_sharded_params and not flat.is_kept:
                self.saved.add(unit, flat)
        self.ready.add(unit.index)

    def release(self, unit: Unit) -> None:
        """Release the gathered values of ``unit`` (stage 3), except within `full_params`."""
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
        """Release every unit not in `stay_gathered`. Suspend `part_hooks` if all blocks stay."""
        self.release_all(self.stay_gathered)
        if self.stay_gathered and self.stay_gathered & self.ready >= {
            unit.index for unit in self.blocks
        }:
            self.part_hooks.suspend()

    def release_all(self, stays: frozenset[int] = frozenset()) -> None:
        """Release every unit, root and tail included, except those in ``stays``."""
        self.saved.referenced.clear()
        self.saved.references.pop_all().close()  # parameters gathered for `SavedParam`
        self.current = self.saved.entered = None
        self._ahead.clear()
        for unit in self.units:
            if unit.index not in stays:
                self.release(unit)

    def set_stay_gathered(self, units: frozenset[int]) -> None:
        """Keep ``units`` (indices) gathered after a forward, until a backward or `release_all`.

        Every rank must set the same units, between two forwards. Units that no longer stay are
        released.
        """
        left, self.stay_gathered = self.stay_gathered - units, units
        for index in sorted(left):
            self.release(self.units[index])

    @contextmanager
    def full_params(self) -> Iterator[None]:
        """Release no unit until the last open context ends, which releases all units."""
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
        """Make parameters placeholders until `FlatParams.reoccupy`. No gather may be under way."""
        for unit in self.units:
            for flat in unit.params:
                flat.vacate()
        self.saved.forget_range()
        self.ready.clear()

    def updated_early(self, segment: Segment) -> None:
        """Note that the state tier has updated a segment during backward."""
        for flat in self.units[segment.unit].params:
            if flat.segment is segment:
                flat.updated_early()
        self.ready.discard(segment.unit)

    def values_changed(self, flats: Iterable[FlatParams] | None = None) -> None:
        """Note that the shards of ``flats`` (all if None) have new values, and call `publish`."""
        with self._publishing:
            if not self.part_hooks.handles:
                self.part_hooks.resume()
            if flats is None:
                self.ready.clear()
                flats = [flat for unit in self.units for flat in unit.params]
            for flat in flats:
                if flat.full is not None:  # a forward may have left old values in ``full``
                    self.release(self.units[flat.segment.unit])
                self.ready.discard(flat.segment.unit)
                flat.invalidate()
            for follow in self._extensions.values_changed:
                follow()
            self.publish()

    def values_replaced(self, flats: Iterable[FlatParams] | None = None) -> None:
        """Call `values_changed` for values that were written outside of a step."""
        self._communicator.forget_values()
        self._communicator.forget_errors()
        self.values_changed(flats)

    def publish(self) -> None:
        """Launch the exchange of changed values that every rank keeps."""
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
        """Wait for all published exchanges."""
        if self._is_publishing:
            for flat in self._published:
                flat.finish_gather()
            self._is_publishing = False
