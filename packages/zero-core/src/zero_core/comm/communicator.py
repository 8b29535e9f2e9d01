"""Collectives of an engine's data path, which name the unit and rank in every failure.

[Note: collectives that hang]
gloo raises where a collective is waited for, and the error names it. NCCL's ``wait`` returns at
once: a rank that hangs shows in torch's own watchdog alone, as a number of a collective, when the
timeout is over. So on such a library a `CollectiveWatch` records an event behind each collective,
on the stream that waits for it, and its thread names the oldest one that has not been reached long
before. In a profile each collective is a range with the same name.

The events of a CUDA graph that is being captured cannot be queried: nothing is noted then. During a
capture in mode "global" no other thread may query any event: see docs/clusters.md.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from zero_core._torch import profiled_range
from zero_core.comm.control import ControlGroup
from zero_core.comm.groups import FailureNotes
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

_log = logging.getLogger(__name__)

WATCHED_SHARE = 0.1
"""Part of the library's timeout after which a collective that has not ended is logged."""
_NUM_WATCHED = 1024
"""Collectives that are remembered at once: hosts do not run further ahead."""
_LAST_WAIT_S = 10.0
"""Longest wait of an engine that ends for collectives that are under way."""


class CollectiveWatch:
    """Thread that logs collectives that hang. See [Note: collectives that hang]."""

    def __init__(self, device: torch.device, *, timeout_s: float) -> None:
        """Watch collectives that this process waits for on ``device``, until `close`.

        ``timeout_s`` is the time after which the library ends a collective, in seconds.
        """
        self._device = device
        self._patience_s = WATCHED_SHARE * timeout_s
        self._lock = threading.Lock()
        self._waited: deque[tuple[str, torch.Event]] = deque(maxlen=_NUM_WATCHED)
        self._oldest: tuple[str, torch.Event] | None = None
        self._since = time.monotonic()
        self._is_logged = False
        self._is_closed = threading.Event()
        args = weakref.ref(self), self._is_closed, device, self._patience_s / 4
        # A daemon: it must not keep the process from ending. Nor does it keep this object.
        threading.Thread(target=_watch, args=args, name="zero_core watch", daemon=True).start()

    def note(self, name: str) -> None:
        """Note that the current stream waits for the collective ``name``."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        event = torch.accelerator.current_stream(self._device).record_event()
        with self._lock:
            if len(self._waited) % 64 == 0:
                self._drop_ended()
            if not self._is_closed.is_set():
                self._waited.append((name, event))

    def log_oldest(self) -> None:
        """Log the oldest collective that has not ended, once it has been so for too long."""
        with self._lock:
            self._drop_ended()
            oldest = self._waited[0] if self._waited else None
        if oldest is not self._oldest:
            self._oldest, self._since, self._is_logged = oldest, time.monotonic(), False
        waited_s = time.monotonic() - self._since
        if oldest is not None and waited_s > self._patience_s and not self._is_logged:
            self._is_logged = True
            _log.error(
                "%s has not ended for %.0f s. If other ranks name another collective, they took "
                "another branch of the model; one that names none is behind, or has died. The "
                "library gives it up after %.0f s",
                oldest[0],
                waited_s,
                self._patience_s / WATCHED_SHARE,
            )

    def close(self) -> None:
        """End the thread, when what was noted has ended, has had its time, or never will end."""
        self._is_closed.set()
        deadline = time.monotonic() + min(self._patience_s, _LAST_WAIT_S)
        while time.monotonic() < deadline:
            with self._lock:
                self._drop_ended()
                if not self._waited:
                    return
            time.sleep(0.01)

    def _drop_ended(self) -> None:
        """Forget what has ended. If the device has failed, log and forget the rest and end."""
        try:
            while self._waited and self._waited[0][1].query():
                self._waited.popleft()
        except RuntimeError as error:  # every later call to the device raises the same
            _log.error(
                "%s has failed: %s. These collectives may not have ended: %s",
                self._device,
                error,
                "; ".join(name for name, _ in self._waited),
            )
            self._is_closed.set()
            self._waited.clear()


def _watch(
    ref: weakref.ref[CollectiveWatch],
    is_closed: threading.Event,
    device: torch.device,
    interval_s: float,
) -> None:
    torch.accelerator.set_device_index(device)  # a thread begins on the first one
    while not is_closed.wait(interval_s):
        watch = ref()
        if watch is None:
            return
        watch.log_oldest()
        del watch


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
        watch = self._owner.watch
        if watch is not None:
            watch.note(self._owner.describe(self._verb, self._segment))


class NamedReduction(NamedWork):
    """A reduction under way, with what the protocols of reductions offer besides."""

    __slots__ = ()

    def contributions(self) -> tuple[Tensor, ...]:
        """Return each rank's part of the sum, in rank order. Empty if they are not shown."""
        work = self._work
        if not self._owner.kind_of(work).shows_parts:
            return ()
        return tuple(cast(Reduction, work).contributions)

    def statistics(self) -> StatisticsReduction | None:
        """Return the reduction if it has the statistics of its sum."""
        work = self._work
        if not self._owner.kind_of(work).has_statistics:
            return None
        return cast(StatisticsReduction, work)

    def acknowledge(self) -> NamedWork | None:
        """Report that the other ranks' parts were read. None if nobody waits for that."""
        work = self._work
        if not self._owner.kind_of(work).is_in_place:
            return None
        verb = f"acknowledgement of the {self._verb}"
        try:
            acknowledgement = cast(InPlaceReduction, work).acknowledge()
            return NamedWork(self._owner, acknowledgement, verb, self._segment)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self._owner.error(verb, self._segment, error) from error


class Communicator:
    """Collectives over segments of a layout, and the control group beside them.

    Attributes:
        transport: the collectives that carry the bytes.
        control: the small exchanges of the same ranks.
        watch: names collectives that hang; None where they raise.
    """

    def __init__(
        self,
        transport: Collectives,
        control: ControlGroup,
        names: Mapping[int, str],
        watch: CollectiveWatch | None = None,
        notes: FailureNotes | None = None,
    ) -> None:
        """Prepare. ``names`` say in messages of which unit each segment is.

        ``notes`` are those of ranks that fail, if these ranks can leave any.

        Raises:
            ConfigError: the collectives have some members of `StatefulCollectives` and not all.
        """
        self.transport = transport
        self.control = control
        self.watch = watch
        self.rank = control.rank
        self.world_size = control.world_size
        self._all_gather = transport.all_gather
        self._reduce_scatter = transport.reduce_scatter
        self._adding = transport if isinstance(transport, AddingCollectives) else None
        self._stateful = transport if isinstance(transport, StatefulCollectives) else None
        self._names = dict(names)
        self._notes = notes
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
            with profiled_range(self.describe("all_gather", segment)):
                work = self._all_gather(
                    out, shard, unit=segment, version=version, backward=backward
                )
        except RuntimeError as error:
            work = _NotStarted(error)
        return NamedWork(self, work, "all_gather", segment)

    def reduce_scatter(self, out: Tensor, full: Tensor, segment: int) -> NamedReduction:
        """Start to sum this rank's slice of every rank's ``full`` into ``out``.

        See `zero_core.protocols.Collectives.reduce_scatter`. `CollectiveError` if it cannot start.
        """
        with self._starting("reduce_scatter", segment):
            work = self._reduce_scatter(out, full, unit=segment)
        return NamedReduction(self, work, "reduce_scatter", segment)

    @property
    def can_add(self) -> bool:
        """Whether the collectives have `reduce_add`."""
        return self._adding is not None

    def reduce_add(self, out: Tensor, full: Tensor, segment: int) -> NamedReduction:
        """Start to add this rank's slice of every rank's ``full`` to ``out``.

        See `zero_core.protocols.AddingCollectives`. `CollectiveError` if it cannot start.
        """
        assert self._adding is not None, "checked when the engine was built"
        with self._starting("reduce_scatter", segment):
            work = self._adding.reduce_add(out, full, unit=segment)
        return NamedReduction(self, work, "reduce_scatter", segment)

    @contextmanager
    def _starting(self, verb: str, segment: int) -> Iterator[None]:
        try:
            with profiled_range(self.describe(verb, segment)):
                yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self.error(verb, segment, error) from error

    def describe(self, verb: str, segment: int) -> str:
        """Return the name of a collective, such as "rank 1: all_gather of unit 3 (blocks.2)"."""
        return f"rank {self.rank}: {verb} of {self._names[segment]}"

    def sum_statistics(self, values: Tensor) -> None:
        """Sum every rank's statistics of a step in place, to the same bits on every rank."""
        name = f"rank {self.rank}: sum of the step's statistics"
        with profiled_range(name):
            self.control.sum(values)
        if self.watch is not None:
            self.watch.note(name)

    def close(self) -> None:
        """End the watch, on this rank alone."""
        if self.watch is not None:
            self.watch.close()

    def note_failure(self, where: str, error: BaseException) -> None:
        """Have the others' errors name ``error`` of this rank, if they fail as they wait for it."""
        if self._notes is not None and not isinstance(error, CollectiveError):
            self._notes.write(f"{where} raised {type(error).__name__}: {error}")

    def clear_failure(self) -> None:
        """Take back what `note_failure` noted: this rank goes on."""
        if self._notes is not None:
            self._notes.clear()

    def error(self, verb: str, segment: int, error: RuntimeError) -> CollectiveError:
        failure = "" if self._notes is None else self._notes.read()
        if failure:
            return CollectiveError(f"{self.describe(verb, segment)} failed: {failure} ({error})")
        return CollectiveError(
            f"{self.describe(verb, segment)} failed or timed out: {error}. If "
            "the ranks took different branches or one of them died, the first rank to report "
            "another error is the cause. A rank without data for a forward of the others must call "
            "engine.idle_step() in its place, or engine.idle_forward() without gradients"
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
