"""How far a step under way has come, for those who wait for a part of it.

A step publishes its runs in ascending order, so one counter says it all: whoever needs a range
waits until the last run that overlaps it is published, and no longer.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

__all__ = ["OffloadError", "Progress"]


class OffloadError(RuntimeError):
    """A step failed midway, mostly in the background; its cause is chained.

    Master weights and state are then partly updated. The tier stays in this state and raises again
    on every call, so that such weights are never saved by mistake.
    """


class Progress:
    """Runs of one step, published in order by one thread and awaited by others."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._runs: tuple[tuple[int, int], ...] = ()
        self._events: list[torch.Event | None] = []
        self._is_open = False
        self._error: BaseException | None = None

    def begin(self, runs: Sequence[tuple[int, int]]) -> None:
        """A step with these runs starts; the last one must be over."""
        assert not self._is_open, "two steps at once"
        self._runs, self._events, self._is_open = tuple(runs), [], True

    def advance(self, event: torch.Event | None) -> None:
        """The next run is published; ``event`` fires when its values have arrived."""
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def finish(self) -> None:
        """The step is over: nothing of the tier's is touched by it any more."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """The step broke; everybody who waits or comes later hears of it."""
        with self._changed:
            self._error, self._is_open = error, False
            self._changed.notify_all()

    def wait(self, start: int, stop: int) -> list[torch.Event]:
        """Block until every run that overlaps ``[start, stop)`` is published; their events.

        Raises:
            OffloadError: the step failed.
        """
        hits = [i for i, (a, b) in enumerate(self._runs) if a < stop and start < b]
        needed = hits[-1] + 1 if hits else 0
        with self._changed:
            self._changed.wait_for(lambda: len(self._events) >= needed or self._error is not None)
        self._check()
        return [event for i in hits if (event := self._events[i]) is not None]

    def drain(self) -> None:
        """Block until no step is under way.

        Raises:
            OffloadError: the step failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._is_open)
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise OffloadError(
                f"an optimizer step failed midway ({self._error!r}), so master weights and state "
                f"are partly updated; load a checkpoint into a new tier"
            ) from self._error
