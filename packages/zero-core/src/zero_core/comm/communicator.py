"""Collectives of an engine's data path, which name the unit and rank in every failure.

In a profile each collective is a range with the same name. `zero_core.watch` names those that hang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from zero_core._torch import profiled_range
from zero_core.comm.control import ControlGroup
from zero_core.errors import CollectiveError, ConfigError
from zero_core.protocols import (
    AddingCollectives,
    Collectives,
    InPlaceCollectives,
    InPlaceReduction,
    Reduction,
    StatefulCollectives,
    StatisticsReduction,
    Work,
)


@dataclass(eq=False)
class _NotStarted:
    """A collective that could not start. It fails where it is waited for."""

    error: RuntimeError

    def wait(self) -> None:
        raise self.error


class _Kind(NamedTuple):
    """Protocols that a class of works satisfies."""

    shows_parts: bool
    is_in_place: bool
    has_statistics: bool


@dataclass(slots=True, eq=False)
class NamedWork:
    """A collective under way whose failure says which one it was."""

    _owner: Communicator
    _work: Work
    _name: str

    def wait(self) -> None:
        """Wait. Raise `CollectiveError` if the collective failed or timed out."""
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


@dataclass(slots=True, eq=False)
class NamedReduction(NamedWork):
    """A reduction under way, with what the protocols of reductions offer besides."""

    _kind: _Kind

    def contributions(self) -> tuple[Tensor, ...]:
        """Return each rank's part of the sum, in rank order. Empty if they are not shown."""
        return tuple(cast(Reduction, self._work).contributions) if self._kind.shows_parts else ()

    def statistics(self) -> StatisticsReduction | None:
        return cast(StatisticsReduction, self._work) if self._kind.has_statistics else None

    def acknowledge(self) -> NamedWork | None:
        """Report that the other ranks' parts were read. None if nobody waits for that."""
        work = self._work
        if not self._kind.is_in_place:
            if self._owner.reduces_in_place:
                raise ConfigError(
                    f"{self._name}: the collectives "
                    f"({type(self._owner.transport).__name__}) say reduces_in_place, and the work "
                    f"that they returned ({type(work).__name__}) has no acknowledge(): gradients "
                    "would be overwritten while other ranks read them; return "
                    "zero_core.protocols.InPlaceReduction, or say that reduces_in_place is False"
                )
            return None
        name = f"acknowledgement of the {self._name}"
        try:
            acknowledgement = cast(InPlaceReduction, work).acknowledge()
        except RuntimeError as error:
            self._owner.fail(name, error)
        return NamedWork(self._owner, acknowledgement, name)


class Communicator:
    """Collectives over segments of a layout, and the control group beside them.

    Attributes:
        transport: the collectives that carry the bytes.
        control: the small exchanges of the same ranks.
        place: where this rank is in its program.
        device_waits: collectives that the device waits for; None where the host does.
    """

    def __init__(
        self,
        transport: Collectives,
        control: ControlGroup,
        names: Mapping[int, str],
    ) -> None:
        """Prepare. ``names`` say in messages of which unit each segment is."""
        self.transport = transport
        self.control = control
        self.place = control.place
        self.device_waits = None if control.watch is None else control.watch.device_waits
        self.rank = control.rank
        self.world_size = control.world_size
        self._adding = transport if isinstance(transport, AddingCollectives) else None
        self._stateful = transport if isinstance(transport, StatefulCollectives) else None
        self._names = dict(names)
        self._names_of: dict[tuple[str, int], str] = {}  # by verb and segment
        self._ranges: dict[str, str] = {}  # in profiles, by name
        self._kinds: dict[type, _Kind] = {}  # of works, by class: the check takes long
        optional = {"forget_values", "forget_errors", "private_nbytes"}
        found = sorted(optional.intersection(dir(transport)))
        if found and self._stateful is None:
            raise ConfigError(
                f"collectives of {type(transport).__name__} have {', '.join(found)} alone: "
                "zero_core.protocols.StatefulCollectives asks for forget_values, forget_errors and "
                "private_nbytes together"
            )

    def all_gather(
        self, out: Tensor, shard: Tensor, segment: int, *, version: int, backward: bool
    ) -> NamedWork:
        """Start to fill ``out`` with every rank's ``shard`` of a segment.

        See `zero_core.protocols.Collectives.all_gather`. If it cannot start, as a peer has ended,
        waiting raises: values gathered ahead may never be needed.
        """
        name = self.name_of("all_gather", segment)
        try:
            with profiled_range(self._ranges[name]):
                work = self.transport.all_gather(
                    out, shard, unit=segment, version=version, backward=backward
                )
        except RuntimeError as error:
            work = _NotStarted(error)
        if self.place.clock is not None:
            self.place.clock.launch(name)
        return NamedWork(self, work, name)

    def reduce_scatter(self, out: Tensor, full: Tensor, segment: int) -> NamedReduction:
        """Start to sum this rank's slice of every rank's ``full`` into ``out``.

        See `zero_core.protocols.Collectives.reduce_scatter`. `CollectiveError` if it cannot start.
        """
        return self._reduce(self.transport.reduce_scatter, out, full, segment)

    @property
    def can_add(self) -> bool:
        return self._adding is not None

    def reduce_add(self, out: Tensor, full: Tensor, segment: int) -> NamedReduction:
        """Start to add this rank's slice of every rank's ``full`` to ``out``.

        See `zero_core.protocols.AddingCollectives`. `CollectiveError` if it cannot start.
        """
        assert self._adding is not None, "checked when the engine was built"
        return self._reduce(self._adding.reduce_add, out, full, segment)

    def _reduce(
        self, start: Callable[..., Work], out: Tensor, full: Tensor, segment: int
    ) -> NamedReduction:
        name = self.name_of("reduce_scatter", segment)
        if self.place.clock is not None:
            self.place.clock.launch(name)
        try:
            with profiled_range(self._ranges[name]):
                work = start(out, full, unit=segment)
        except RuntimeError as error:
            self.fail(name, error)
        kind = self._kinds.get(type(work))
        if kind is None:
            protocols = (Reduction, InPlaceReduction, StatisticsReduction)
            kind = self._kinds[type(work)] = _Kind(*(isinstance(work, p) for p in protocols))
        return NamedReduction(self, work, name, kind)

    def fail(self, name: str, error: RuntimeError) -> NoReturn:
        """Raise ``error`` of the collective ``name`` as a `CollectiveError`.

        `torch.OutOfMemoryError` is no failure of the ranks' exchange and stays what it is.
        """
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        raise self.control.error(name, error) from error

    def name_of(self, verb: str, segment: int) -> str:
        """Return the name that a collective has on all ranks: "all_gather of unit 3 (blocks.2)"."""
        name = self._names_of.get((verb, segment))
        if name is None:
            name = self._names_of[verb, segment] = f"{verb} of {self._names[segment]}"
            self._ranges[name] = f"rank {self.rank}: {name}"
        return name

    def sum_statistics(self, values: Tensor) -> None:
        """Sum every rank's statistics of a step in place, to the same bits on every rank."""
        name = "sum of the step's statistics"
        with profiled_range(f"rank {self.rank}: {name}"), self.place.during(name):
            self.control.sum(values)

    def close(self) -> None:
        """End the watch, on this rank alone."""
        watch = self.control.watch
        if watch is not None:
            watch.close("its engine was closed")
        if self.device_waits is not None:
            self.device_waits.close()

    def note_failure(self, where: str, error: BaseException) -> None:
        """Have the others' errors name ``error`` of this rank, if they fail as they wait for it."""
        watch = self.control.watch
        if watch is not None and not isinstance(error, CollectiveError):
            watch.note_cause(f"{where} raised {type(error).__name__}: {error}")

    def clear_failure(self) -> None:
        """Take back what `note_failure` noted: this rank goes on."""
        if self.control.watch is not None:
            self.control.watch.note_cause("")

    @property
    def reduces_in_place(self) -> bool:
        """Whether other ranks may read this rank's gradients in place."""
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
