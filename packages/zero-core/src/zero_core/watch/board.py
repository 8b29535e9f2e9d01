"""Exchange of beats through a store, on a thread of its own.

[Note: stores that do not answer]
A request to a store whose host is stopped blocks for ever, whatever the store's timeout: torch
cancels the request, and waits without limit for the answer to that. So only the thread of a
`ThreadedBoard` calls the store. Those who watch and those who wait read what it left, and how long
its call has taken: a store that does not answer is a cause, too.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from typing import Protocol


class BeatStore(Protocol):
    """Place where ranks put their beats. Calls may block. Connection errors are RuntimeErrors."""

    host: str  # what hosts it, such as "rank 0 of the job (it hosts the store at node1:29500)"

    def publish(self, beat: str) -> None:
        """Replace this rank's beat."""

    def read(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the beats of those of ``ranks`` that have published one."""


class ThreadedBoard:
    """A `BeatStore` whose calls do not block. See [Note: stores that do not answer]."""

    def __init__(self, store: BeatStore) -> None:
        self.host = store.host
        self._calls = calls = _Calls()
        # A daemon: a store that does not answer must not keep the process from ending.
        threading.Thread(
            target=_serve, args=(store, calls), name="zero_core beats", daemon=True
        ).start()
        weakref.finalize(self, calls.close).atexit = False  # a last beat says how a process ends

    @property
    def is_lost(self) -> bool:
        """Whether the connection has failed. Nothing is published or read any more."""
        return self._calls.is_lost

    def publish(self, beat: str) -> None:
        """Have this rank's beat replaced."""
        calls = self._calls
        with calls.changed:
            calls.beat = beat
            calls.changed.notify_all()

    def request(self, ranks: Sequence[int]) -> None:
        """Have the beats of ``ranks`` read."""
        calls = self._calls
        with calls.changed:
            calls.ranks = ranks
            calls.changed.notify_all()

    def take(self) -> dict[int, str]:
        """Return the beats that were read since the last call."""
        calls = self._calls
        with calls.changed:
            found, calls.found = calls.found, {}
        return found

    def unanswered_s(self) -> float:
        """Return for how long the store has not answered what it was asked."""
        since = self._calls.busy_since
        return 0.0 if since is None else time.monotonic() - since

    def flush(self, limit_s: float) -> None:
        """Return when the last beat is published, or after ``limit_s``."""
        calls = self._calls
        with calls.changed:
            calls.changed.wait_for(lambda: calls.is_lost or calls.is_idle(), limit_s)


class _Calls:
    """Pending calls of the thread and their results, guarded by ``changed``."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.beat: str | None = None  # the newest that is not yet published, or None
        self.ranks: Sequence[int] | None = None  # whose beats are to be read, or None
        self.found: dict[int, str] = {}  # what was read
        self.busy_since: float | None = None  # when the call under way began, or None
        self.is_lost = False
        self.is_closed = False

    def close(self) -> None:
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()

    def is_idle(self) -> bool:
        return self.beat is None and self.ranks is None and self.busy_since is None

    def next(self) -> tuple[str | None, Sequence[int] | None] | None:
        """Wait for the next calls, and begin them. None after the last."""
        with self.changed:
            self.busy_since = None
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.is_closed or not self.is_idle())
            if self.is_idle():
                return None
            asked = self.beat, self.ranks
            self.beat = self.ranks = None
            self.busy_since = time.monotonic()
            return asked


def _serve(store: BeatStore, calls: _Calls) -> None:
    """Make the calls. The thread keeps no board, which may thus be dropped."""
    try:
        while (asked := calls.next()) is not None:
            beat, ranks = asked
            if beat is not None:
                store.publish(beat)
            if ranks is not None:
                found = store.read(ranks)
                with calls.changed:
                    calls.found |= found
    except RuntimeError:  # the store's host has ended
        with calls.changed:
            calls.is_lost = True
            calls.busy_since = None
            calls.changed.notify_all()
