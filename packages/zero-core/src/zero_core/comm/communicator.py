"""Collectives of an engine's data path, which name the unit and rank in every failure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zero_core.comm.control import ControlGroup
from zero_core.errors import CollectiveError, ConfigError
from zero_core.protocols import (
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
    _verb: str
    _segment: int

    def wait(self) -> None:
        """Wait. Raise `CollectiveError` if the collective failed or timed out.

        `torch.OutOfMemoryError` is no failure of the ranks' exchange and stays what it is.
        """
        try:
            self._work.wait()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self._owner.error(self._verb, self._segment, error) from error


class NamedReduction(NamedWork):
    """A reduction under way, with what the protocols of reductions offer besides."""

    __slots__ = ()

    def contributions(self) -> tuple[Tensor, ...]:
        """Return each rank's part of the sum, in rank order. Empty if they are not shown."""
        work = self._work
        if not self._owner.kind_of(work).shows_parts:
            return ()
        assert isinstance(work, Reduction)
        return tuple(work.contributions)

    def statistics(self) -> StatisticsReduction | None:
        """Return the reduction if it has the statistics of its sum."""
        work = self._work
        if not self._owner.kind_of(work).has_statistics:
            return None
        assert isinstance(work, StatisticsReduction)
        return work

    def acknowledge(self) -> NamedWork | None:
        """Report that the other ranks' parts were read. None if nobody waits for that."""
        work = self._work
        if not self._owner.kind_of(work).is_in_place:
            return None
        assert isinstance(work, InPlaceReduction)
        verb = f"acknowledgement of the {self._verb}"
        try:
            return NamedWork(self._owner, work.acknowledge(), verb, self._segment)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self._owner.error(verb, self._segment, error) from error


class Communicator:
    """Collectives over segments of a layout, and the control group beside them.

    Attributes:
        transport: the collectives that carry the bytes.
        control: the small exchanges of the same ranks.
    """

    def __init__(
        self, transport: Collectives, control: ControlGroup, names: Mapping[int, str]
    ) -> None:
        """Prepare. ``names`` say in messages of which unit each segment is.

        Raises:
            ConfigError: the collectives have some members of `StatefulCollectives` and not all.
        """
        self.transport = transport
        self.control = control
        self.rank = control.rank
        self.world_size = control.world_size
        self._all_gather = transport.all_gather
        self._reduce_scatter = transport.reduce_scatter
        self._stateful = transport if isinstance(transport, StatefulCollectives) else None
        self._names = dict(names)
        self._kinds: dict[type, _Kind] = {}
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
        try:
            work = self._all_gather(out, shard, unit=segment, version=version, backward=backward)
        except RuntimeError as error:
            work = _NotStarted(error)
        return NamedWork(self, work, "all_gather", segment)

    def reduce_scatter(self, out: Tensor, full: Tensor, segment: int) -> NamedReduction:
        """Start to sum this rank's slice of every rank's ``full`` into ``out``.

        See `zero_core.protocols.Collectives.reduce_scatter`. `CollectiveError` if it cannot start.
        """
        try:
            work = self._reduce_scatter(out, full, unit=segment)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self.error("reduce_scatter", segment, error) from error
        return NamedReduction(self, work, "reduce_scatter", segment)

    def error(self, verb: str, segment: int, error: RuntimeError) -> CollectiveError:
        return CollectiveError(
            f"rank {self.rank}: {verb} of {self._names[segment]} failed or timed out: {error}. If "
            "the ranks took different branches or one of them died, the first rank to report "
            "another error is the cause"
        )

    def kind_of(self, work: Work) -> _Kind:
        """Return which protocols ``work`` satisfies. Checked once per class."""
        found = self._kinds.get(type(work))
        if found is None:
            protocols = (Reduction, InPlaceReduction, StatisticsReduction)
            found = self._kinds[type(work)] = _Kind(*(isinstance(work, p) for p in protocols))
        return found

    @property
    def reduces_in_place(self) -> bool:
        """Whether other ranks may read this rank's gradients in place."""
        transport = self.transport
        return isinstance(transport, InPlaceCollectives) and transport.reduces_in_place

    @property
    def private_nbytes(self) -> Mapping[str, int]:
        """Bytes that the collectives hold on this rank, by kind."""
        return {} if self._stateful is None else self._stateful.private_nbytes

    def forget_values(self) -> None:
        if self._stateful is not None:
            self._stateful.forget_values()

    def forget_errors(self) -> None:
        if self._stateful is not None:
            self._stateful.forget_errors()
