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
    """A `BeatStore` whose calls do not block. Its thread keeps it alive until `close`."""

    def __init__(self, store: BeatStore) -> None:
        self.host = store.host
        self.is_lost = False  # the connection has failed: nothing is published or read any more
        self._store = store
        self._changed = threading.Condition()  # guards what follows
        self._beat: str | None = None  # the newest that is not yet published, or None
        self._ranks: Sequence[int] | None = None  # whose beats are to be read, or None
        self._found: dict[int, str] = {}  # what was read
        self._busy_since: float | None = None  # when the call under way began, or None
        self._is_closed = False
        # A daemon: a store that does not answer must not keep the process from ending.
        threading.Thread(target=self._serve, name="zero_core beats", daemon=True).start()

    def publish(self, beat: str) -> None:
        with self._changed:
            self._beat = beat
            self._changed.notify_all()

    def request(self, ranks: Sequence[int]) -> None:
        with self._changed:
            self._ranks = ranks
            self._changed.notify_all()

    def take(self) -> dict[int, str]:
        """Return the beats that were read since the last call."""
        with self._changed:
            found, self._found = self._found, {}
        return found

    def unanswered_s(self) -> float:
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def flush(self, limit_s: float) -> None:
        """Return when the last beat is published, or after ``limit_s``."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_lost or self._is_idle(), limit_s)

    def close(self) -> None:
        """End the thread once nothing is pending."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _is_idle(self) -> bool:
        return self._beat is None and self._ranks is None and self._busy_since is None

    def _serve(self) -> None:
        try:
            while True:
                with self._changed:
                    self._busy_since = None
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._is_closed or not self._is_idle())
                    if self._is_idle():
                        return
                    beat, ranks = self._beat, self._ranks
                    self._beat = self._ranks = None
                    self._busy_since = time.monotonic()
                if beat is not None:
                    self._store.publish(beat)
                if ranks is not None:
                    found = self._store.read(ranks)
                    with self._changed:
                        self._found |= found
        except RuntimeError:  # the store's host has ended
            with self._changed:
                self.is_lost = True
                self._busy_since = None
                self._changed.notify_all()
