"""All-gathers and reduce-scatters of an engine, with errors that name the unit and the rank.

Each collective starts in a profiler range. `zero_core.comm.watch` reports collectives that hang.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NoReturn, cast

import torch
from torch import Tensor

from zero_core._torch import profiled_range
from zero_core.comm.control import ControlGroup
from zero_core.comm.queues import Pending
from zero_core.comm.watch import join_few
from zero_core.errors import CollectiveError, ConfigError
from zero_core.protocols import (
    AddingCollectives,
    AnnouncingCollectives,
    CheckedCollectives,
    Collectives,
    InPlaceCollectives,
    InPlaceReduction,
    Reduction,
    StatefulCollectives,
    StatisticsReduction,
    Work,
)

_OFFERED = (Reduction, InPlaceReduction, StatisticsReduction)  # optional protocols of a reduction


@dataclass(slots=True, eq=False)
class NamedWork:
    """A pending collective. Errors from `wait` name the collective.

    ``_protocols``: the optional protocols that ``_work`` implements, if it is a reduction.
    """

    _owner: Communicator
    _work: Work
    _name: str
    _protocols: frozenset[type] = frozenset()

    def wait(self) -> None:
        owner, what = self._owner, self._name
        owner.place.begin_wait(what)
        try:
            self._work.wait()
        except RuntimeError as error:
            owner.fail(what, error)
        finally:
            owner.place.end_wait()
        if owner.device_waits is not None:
            owner.device_waits.note(what)

    def contributions(self) -> tuple[Tensor, ...]:
        """Return the slice that each rank contributed, in rank order. Empty if they are unknown."""
        is_shown = Reduction in self._protocols
        return tuple(cast(Reduction, self._work).contributions) if is_shown else ()

    def statistics(self) -> StatisticsReduction | None:
        has_any = StatisticsReduction in self._protocols
        return cast(StatisticsReduction, self._work) if has_any else None

    def acknowledge(self) -> NamedWork | None:
        """Report to other ranks that their slices were read. Returns None if no rank waits."""
        if InPlaceReduction not in self._protocols:
            return None
        name = f"acknowledgement of the {self._name}"
        try:
            acknowledgement = cast(InPlaceReduction, self._work).acknowledge()
        except RuntimeError as error:
            self._owner.fail(name, error)
        return NamedWork(self._owner, acknowledgement, name)


class Communicator:
    """Collectives over a layout's segments (flat buffers), and the control group of the ranks."""

    def __init__(
        self, transport: Collectives, control: ControlGroup, names: Mapping[int, str]
    ) -> None:
        """``names`` maps each segment's index to the name of its unit, for messages."""
        self.transport = transport
        self.control = control
        self.place = control.place
        self.watch = control.watch
        # Log of collectives that the device waits for. None if the host waits, or without a watch.
        self.device_waits = None if self.watch is None else self.watch.device_waits
        self.rank = control.rank
        self.world_size = control.world_size
        self._stateful = transport if isinstance(transport, StatefulCollectives) else None
        is_announcing = isinstance(transport, AnnouncingCollectives) and transport.announces
        self.announcing = cast(AnnouncingCollectives, transport) if is_announcing else None
        self.checks = transport.checks if isinstance(transport, CheckedCollectives) else None
        self._names = names
        # Protocols of reduction works, cached by class because isinstance() on protocols is slow.
        self._protocols: dict[type, frozenset[type]] = {}
        optional = {"forget_values", "forget_errors", "begin_step", "private_nbytes"}
        found = sorted(optional.intersection(dir(transport)))
        if found and self._stateful is None:
            raise ConfigError(
                f"collectives of {type(transport).__name__} have {', '.join(found)} alone: "
                "zero_core.protocols.StatefulCollectives asks for all of its members together"
            )

    def all_gather(
        self, out: Tensor, shard: Tensor, segment: int, *, version: int, backward: bool
    ) -> NamedWork:
        name = self.name_of("all_gather", segment)
        try:
            with profiled_range(f"rank {self.rank}: {name}"):
                work = self.transport.all_gather(
                    out, shard, unit=segment, version=version, backward=backward
                )
        except RuntimeError as error:
            # Raise the error only in `wait`, because prefetched values may be unused.
            outcome: Future[None] = Future()
            outcome.set_exception(error)
            work = Pending(outcome.result)
        if self.place.clock is not None:
            self.place.clock.launch(name)
        return NamedWork(self, work, name)

    def reduce_scatter(
        self, out: Tensor, full: Tensor, segment: int, *, is_added: bool = False
    ) -> NamedWork:
        """Start a segment's reduce-scatter. ``is_added``: add to ``out`` instead of overwriting."""
        name = self.name_of("reduce_scatter", segment)
        if self.place.clock is not None:
            self.place.clock.launch(name)
        try:
            with profiled_range(f"rank {self.rank}: {name}"):
                if is_added:  # `build` has checked that the collectives support reduce_add
                    adding = cast(AddingCollectives, self.transport)
                    work = adding.reduce_add(out, full, unit=segment)
                else:
                    work = self.transport.reduce_scatter(out, full, unit=segment)
        except RuntimeError as error:
            self.fail(name, error)
        kind = type(work)
        if kind not in self._protocols:
            found = frozenset(p for p in _OFFERED if isinstance(work, p))
            is_acknowledged = InPlaceReduction in found and StatisticsReduction not in found
            if (self.reduces_in_place or InPlaceReduction in found) and not is_acknowledged:
                raise ConfigError(
                    f"{name}: the collectives ({type(self.transport).__name__}) read gradients in "
                    f"place, and the engine acknowledges no {kind.__name__}, which has no "
                    "acknowledge(), or statistics beside it: gradients would be overwritten while "
                    "other ranks read them; return zero_core.protocols.InPlaceReduction without "
                    "norm and nonfinite, or say that reduces_in_place is False"
                )
            self._protocols[kind] = found
        return NamedWork(self, work, name, self._protocols[kind])

    def fail(self, name: str, error: RuntimeError) -> NoReturn:
        if isinstance(error, torch.OutOfMemoryError):  # an error of this rank, not of a collective
            raise error
        raise self.control.error(name, error) from error

    def name_of(self, verb: str, segment: int) -> str:
        """Return a collective's name, equal on all ranks: "all_gather of unit 3 (blocks.2)"."""
        return f"{verb} of {self._names[segment]}"

    def sum_statistics(self, values: Tensor) -> None:
        name = "sum of the step's statistics"
        with profiled_range(f"rank {self.rank}: {name}"), self.place.during(name):
            self.control.sum(values)

    def refuse_damaged(self, outcome: str) -> NoReturn:
        """Raise a CollectiveError about all ranks' damaged messages. Every rank must call it."""
        found = [] if self.checks is None else self.checks.take()
        own = join_few([f"{self._names[unit]}: {why}" for unit, why in found])
        rows = enumerate(self.control.gather_bytes(own.encode()))
        named = join_few([f"on rank {rank}, {row.decode()}" for rank, row in rows if row])
        raise CollectiveError(f"rank {self.rank}: {outcome}, as {named}")

    def announce(self, shards: Sequence[tuple[int, int, Tensor | None, Tensor]]) -> None:
        """Agree on message lengths by `AnnouncingCollectives.announce`, and wait for the result."""
        assert self.announcing is not None, "the caller has checked it"
        name = "exchange of the lengths of weights"
        with profiled_range(f"rank {self.rank}: {name}"):
            work = self.announcing.announce(shards)
        NamedWork(self, work, name).wait()

    def close(self) -> None:
        """Stop the watch on this rank, as `Watch.leave` describes."""
        if self.watch is not None:
            self.watch.leave()

    def note_failure(self, where: str, error: BaseException) -> None:
        """Publish this rank's error, so that other ranks can name it as the cause of a timeout."""
        if self.watch is not None and not isinstance(error, CollectiveError):
            self.watch.note_cause(f"{where} raised {type(error).__name__}: {error}")

    def clear_failure(self) -> None:
        """Withdraw the error that `note_failure` published, because this rank continues."""
        if self.watch is not None:
            self.watch.note_cause("")

    @property
    def reduces_in_place(self) -> bool:
        transport = self.transport
        return isinstance(transport, InPlaceCollectives) and transport.reduces_in_place

    @property
    def private_nbytes(self) -> Mapping[str, int]:
        return {} if self._stateful is None else self._stateful.private_nbytes

    def forget_values(self) -> None:
        if self._stateful is not None:
            self._stateful.forget_values()

    def forget_errors(self) -> None:
        if self._stateful is not None:
            self._stateful.forget_errors()

    def begin_step(self, number: int) -> None:
        if self._stateful is not None:
            self._stateful.begin_step(number)
