"""Progress of the steps under way, for callers that wait for a range of them.

A step publishes its runs in the order in which they are updated, which is that of need and not of
offsets (see `zero_offload.tiers.worker`). A caller that needs a range waits until every run that
overlaps it is published, and no longer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch

from zero_offload.errors import OffloadError
from zero_offload.flat.intervals import SpanMap


@dataclass(slots=True)
class Published:
    """Whether a run's new values are published, and the event that fires when they arrive."""

    is_published: bool = False
    event: torch.Event | None = None


class Progress:
    """Runs of all steps under way, published by one thread and awaited by others.

    ``changed`` guards it and is notified whenever a run is published or a step ends. ``error`` is
    that of the first step that failed. Steps that queue behind it must not run. ``stall_s`` are the
    seconds of `wait` so far.
    """

    def __init__(
        self,
        changed: threading.Condition | None = None,
        now: Callable[[], float] = perf_counter,
    ) -> None:
        self._changed = changed or threading.Condition()
        self._now = now
        self.stall_s = 0.0
        self._runs: SpanMap[Published] = SpanMap()  # the last one of each element
        self._num_open = 0
        self.error: BaseException | None = None

    def begin(self, runs: Sequence[tuple[int, int]]) -> tuple[list[Published], list[Published]]:
        """Add a step. Return an entry per run, and earlier ones that must be published first."""
        with self._changed:
            new = [Published() for _ in runs]
            before: list[Published] = []
            for (start, stop), entry in zip(runs, new, strict=True):
                before += [v for *_, v in self._runs.overlaps(start, stop) if not v.is_published]
                self._runs.put(start, stop, entry)
            self._num_open += 1
        return new, before

    def begin_unpublished(self, runs: Sequence[tuple[int, int]]) -> list[Published]:
        """Add work that publishes nothing. Return entries that must be published before it."""
        with self._changed:
            self._num_open += 1
            overlapping = [entry for run in runs for entry in self._overlapping(*run)]
            return [entry for entry in overlapping if not entry.is_published]

    def publish(self, entry: Published, event: torch.Event | None) -> None:
        """Mark a run as published. ``event`` fires when its values have arrived."""
        with self._changed:
            entry.event, entry.is_published = event, True
            self._changed.notify_all()

    def finish(self, error: BaseException | None = None) -> None:
        """End a step, with an error for all present and later callers if it failed."""
        with self._changed:
            self.error = self.error or error
            self._num_open -= 1
            self._changed.notify_all()

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Begin and launch a step in this context. An exception, Ctrl-C too, fails the step."""
        try:
            yield
        except BaseException as error:
            self.finish(error)
            raise

    def _overlapping(self, start: int, stop: int) -> list[Published]:
        return [entry for *_, entry in self._runs.overlaps(start, stop)]

    def wait(self, start: int, stop: int) -> list[torch.Event]:
        """Block until all runs that overlap a range are published, and return their events."""
        started = self._now()
        with self._changed:
            hits = self._overlapping(start, stop)
            self._changed.wait_for(lambda: self.error or all(e.is_published for e in hits))
        self.check()
        self.stall_s += self._now() - started
        return [entry.event for entry in hits if entry.event is not None]

    def is_over(self, start: int, stop: int) -> bool:
        """Return whether all runs in a range have arrived. False after a step that failed."""
        with self._changed:
            if self.error is not None:
                return False
            hits = self._overlapping(start, stop)
            return all(e.is_published and (e.event is None or e.event.query()) for e in hits)

    def drain(self) -> None:
        """Block until no step is under way."""
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None or self._num_open <= 0)
        self.check()

    def check(self) -> None:
        """Raise OffloadError if a step failed."""
        if self.error is not None:
            raise OffloadError(
                f"an optimizer step failed midway ({self.error!r}), so master weights and state "
                f"are partly updated; load a checkpoint into a new tier (with zero_core: build the "
                "engine again)"
            ) from self.error
