"""Progress of the steps under way, for callers that wait for a range of them.

A step publishes its runs in ascending order, and queued steps do so one after another. A caller
that needs a range waits until every run that overlaps it is published, and no longer.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zero_offload.errors import OffloadError
from zero_offload.flat.intervals import SpanMap


@dataclass(slots=True)
class _Run:
    start: int
    stop: int
    is_published: bool = False
    event: torch.Event | None = None


class Progress:
    """Runs of all steps under way, published in order by one thread and awaited by others.

    Attributes:
        error: of the first step that failed. Steps that queue behind it must not run.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._runs: list[_Run] = []  # in the order of publication
        self._num_published = 0
        self._num_open = 0
        self.error: BaseException | None = None

    def begin(self, runs: Sequence[tuple[int, int]]) -> None:
        """Add a step with these ascending runs, after those that are under way."""
        new = SpanMap((start, stop, None) for start, stop in runs)
        with self._changed:

            def is_replaced(old: _Run) -> bool:
                found = new.last_from(old.start)
                return old.is_published and found is not None and old.stop <= found[1]

            self._runs = [old for old in self._runs if not is_replaced(old)]
            self._num_published = sum(old.is_published for old in self._runs)
            self._runs += [_Run(*run) for run in runs]
            self._num_open += 1

    def advance(self, event: torch.Event | None) -> None:
        """Mark the next run as published. ``event`` fires when its values have arrived."""
        with self._changed:
            run = self._runs[self._num_published]
            run.event, run.is_published = event, True
            self._num_published += 1
            self._changed.notify_all()

    def finish(self, error: BaseException | None = None) -> None:
        """End the oldest step, with an error for all present and later callers if it failed."""
        with self._changed:
            self.error = self.error or error
            self._num_open -= 1
            self._changed.notify_all()

    def _overlapping(self, start: int, stop: int) -> list[_Run]:
        return [run for run in self._runs if run.start < stop and start < run.stop]

    def wait(self, start: int, stop: int) -> list[torch.Event]:
        """Block until every run that overlaps a range is published, and return their events.

        Raises:
            OffloadError: a step failed.
        """
        with self._changed:
            hits = self._overlapping(start, stop)
            self._changed.wait_for(lambda: self.error or all(run.is_published for run in hits))
        self.check()
        return [run.event for run in hits if run.event is not None]

    def is_over(self, start: int, stop: int) -> bool:
        """Return whether every run that overlaps ``[start, stop)`` is published and has arrived."""
        with self._changed:
            hits = self._overlapping(start, stop)
            return all(r.is_published and (r.event is None or r.event.query()) for r in hits)

    def drain(self) -> None:
        """Block until no step is under way.

        Raises:
            OffloadError: a step failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.error is not None or self._num_open <= 0)
        self.check()

    def check(self) -> None:
        """Raise OffloadError if a step failed."""
        if self.error is not None:
            raise OffloadError(
                f"an optimizer step failed midway ({self.error!r}), so master weights and state "
                f"are partly updated; load a checkpoint into a new tier"
            ) from self.error
