"""Heartbeats of ranks: their exchange through a store, and what those of all ranks say of a wait.

[Note: which rank the others wait for]
A rank publishes a beat every tenth of the time set, by a thread. So a stopped or dead process, or
one whose interpreter is held, publishes none. A rank that waits for long compares two beats of each
rank. Their times are those of its own clock: clocks of hosts need not agree.

1. A rank that failed, ended or shows no sign of life is the cause.
2. Else, if any rank has moved meanwhile, it is slow, and nothing is said: slow steps are healthy.
3. Else a rank that waits for no other is the cause. It is busy in one place, which may be healthy.
4. Else all wait. If not for the same collective, they took different branches.

[Note: stores that do not answer]
A request to a store whose host is stopped blocks for ever, whatever the store's timeout: torch
cancels the request, and waits without limit for the answer to that. So only the thread of a
`ThreadedBoard` calls the store. Those who watch and those who wait read what it left, and how long
its call has taken: a store that does not answer is a cause, too.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from zero_core.watch.place import OUTSIDE

OTHER_BLOCKS = (
    "If a rank calls blocks that others do not call, as experts, name the module that holds them "
    "in zero_optimization.leaf_module"
)
_MAX_RANKS = 4
_ENDED = ("Z", "X")
_STOPPED = {"T": "its process is stopped", "t": "a debugger holds its process"}


class Beat(NamedTuple):
    """State of a rank that it publishes."""

    number: int  # increases with each beat
    place: str  # `zero_core.watch.place.Place.doing`, with the step
    waits_for: str  # the collective that it waits for, with the step, or an empty string
    num_changes: int  # of its place
    still_s: float  # how long it has been there
    cause: str  # the error of its own that others wait in vain for, or how it ended
    has_given_up: bool  # whether it failed as it waited for another rank
    pid: int
    namespace: str  # of ``pid``

    @classmethod
    def from_json(cls, text: str) -> Beat:
        values = json.loads(text)
        types = [int, str, str, int, float, str, bool, int, str]
        if not isinstance(values, list) or list(map(type, values)) != types:
            raise ValueError(f"expected the state of a rank of this version, found {text:.200}")
        return cls(*values)


class Verdict(NamedTuple):
    """Reason for which a rank waits."""

    text: str  # names ranks
    level: int  # of `logging`: ERROR for what does not heal by itself, INFO for what is no cause
    is_final: bool  # whether waiting longer would not change it


@dataclass
class _Seen:
    """The last beat of a rank, and when this rank read it, first saw its number, and its place."""

    beat: Beat
    at: float
    since: float
    place_since: float

    @property
    def silent_s(self) -> float:  # what happened after the last read is not known
        return self.at - self.since

    @property
    def still_s(self) -> float:
        return self.beat.still_s + self.silent_s


class Wait:
    """A wait of this rank, and the beats of all ranks as it has seen them since its begin."""

    def __init__(self, rank: int, world_size: int, identity: object, since: float) -> None:
        """``identity`` differs from that of other waits. None: this rank does not wait."""
        self.identity = identity
        self.since = since
        self.last_read = -math.inf
        self.window = 0  # number of the one that is read
        self.logged: Verdict | None = None
        self._rank = rank
        self._world_size = world_size
        self._seen: dict[int, _Seen] = {}

    def add(self, rank: int, beat: Beat, now: float) -> None:
        seen = self._seen.setdefault(rank, _Seen(beat, now, now, now))
        if seen.beat.num_changes != beat.num_changes:
            seen.place_since = now
        if seen.beat.number != beat.number:
            seen.since = now
        seen.beat, seen.at = beat, now

    def judge(self, *, silence_s: float, patience_s: float) -> Verdict | None:
        """Return what keeps this rank waiting. See [Note: which rank the others wait for].

        None if some rank moves or was not read, or all wait for the same. A rank that is busy in a
        place for less than ``patience_s`` moves.
        """
        others = {rank: seen for rank, seen in sorted(self._seen.items()) if rank != self._rank}
        at_work = {rank: seen for rank, seen in others.items() if not seen.beat.has_given_up}
        failures = [_failure(rank, seen, silence_s) for rank, seen in at_work.items()]
        if any(failures):
            return Verdict(_join(failures), logging.ERROR, True)
        if len(self._seen) < self._world_size:
            return None
        if any(seen.at - seen.place_since < silence_s for seen in at_work.values()):
            return None
        busy = {rank: seen for rank, seen in at_work.items() if not seen.beat.waits_for}
        if any(seen.still_s < patience_s for seen in busy.values()):
            return None
        if busy:
            said = []
            for rank, seen in busy.items():
                place = seen.beat.place
                is_outside = place.startswith(OUTSIDE)
                more = " (evaluation, data or a file, if it is healthy)" if is_outside else ""
                said.append(f"rank {rank} has been in {place} for {seen.still_s:.1f} s{more}")
            return Verdict(_join(said), logging.WARNING, False)
        if others and not at_work:
            return Verdict(f"{count_ranks(sorted(others))} gave up before", logging.INFO, True)
        waits: dict[str, list[int]] = {}
        for rank, seen in sorted(self._seen.items()):
            if seen.beat.waits_for and (rank == self._rank or rank in at_work):
                waits.setdefault(seen.beat.waits_for, []).append(rank)
        if len(waits) < 2:
            return None
        said = [f"{count_ranks(ranks)} in {what}" for what, ranks in waits.items()]
        text = f"the ranks took different branches: they wait {_join(said)}. {OTHER_BLOCKS}"
        return Verdict(text, logging.ERROR, True)

    def dead(self, ranks: Collection[int], silence_s: float) -> str:
        """Say which of ``ranks`` have ended, or have not beaten for ``silence_s``."""
        said = []
        for rank, seen in sorted(self._seen.items()):
            is_dead = _state_of(seen.beat) in _ENDED or seen.silent_s >= silence_s
            if rank in ranks and is_dead:
                said.append(_failure(rank, seen, silence_s))
        return _join(said)


def _failure(rank: int, seen: _Seen, silence_s: float) -> str:
    """Say how a rank failed, ended or fell silent, or nothing."""
    beat, state = seen.beat, _state_of(seen.beat)
    if beat.cause:
        return f"rank {rank}: {beat.cause}"
    if state in _ENDED:
        return f"the process of rank {rank} has ended, last seen in {beat.place}"
    if state not in _STOPPED and seen.silent_s < silence_s:
        return ""
    how = _STOPPED.get(state, "its process runs" if state else "process or network")
    where = f"{beat.place}, waiting for {beat.waits_for}" if beat.waits_for else beat.place
    silence = f"{seen.silent_s:.1f} s ({how})"
    return f"no sign of life of rank {rank} for {silence}, last seen in {where}"


def _state_of(beat: Beat) -> str:
    return process_state(beat.pid) if process_namespace() == beat.namespace != "" else ""


class ThreadedBoard:
    """Beats in a store of torch's, by calls that do not block.

    Its thread keeps it alive until `close`.
    """

    def __init__(self, store: Any, host: str, keys: Sequence[str], rank: int) -> None:
        """``keys`` of all ranks' beats. ``host`` of the store, as "rank 0 of the job"."""
        self.host = host
        self.is_lost = False  # the connection has failed: nothing is published or read any more
        self._store = store
        self._keys = keys
        self._rank = rank
        self._known: set[int] = set()  # ranks that have published a beat
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
        with self._changed:
            found, self._found = self._found, {}
        return found

    def unanswered_s(self) -> float:
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def flush(self, limit_s: float) -> None:
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
                    self._store.set(self._keys[self._rank], beat)
                if ranks is not None:
                    found = self._read(ranks)
                    with self._changed:
                        self._found |= found
        except RuntimeError:  # the store's host has ended
            with self._changed:
                self.is_lost = True
                self._busy_since = None
                self._changed.notify_all()

    def _read(self, ranks: Sequence[int]) -> dict[int, str]:
        # `multi_get` would wait for a key that was never set.
        unknown = [rank for rank in ranks if rank not in self._known]
        if unknown and self._store.check([self._keys[rank] for rank in unknown]):
            self._known.update(unknown)
        else:
            self._known.update(r for r in unknown if self._store.check([self._keys[r]]))
        there = [rank for rank in ranks if rank in self._known]
        found = self._store.multi_get([self._keys[rank] for rank in there])
        return {rank: beat.decode() for rank, beat in zip(there, found, strict=True)}


def _join(texts: list[str]) -> str:
    """Join those of ``texts`` that are not empty, and say how many more there are."""
    said = list(filter(None, texts))
    more = [f"and {len(said) - _MAX_RANKS} more"] if len(said) > _MAX_RANKS else []
    return "; ".join(said[:_MAX_RANKS] + more)


def count_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1", "ranks 0, 2", or the first few and how many more."""
    more = f" and {len(ranks) - _MAX_RANKS} more" if len(ranks) > _MAX_RANKS else ""
    named = ", ".join(map(str, ranks[:_MAX_RANKS]))
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {named}{more}"


def process_namespace() -> str:
    """Return what processes must have in common for their numbers to mean the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def process_state(pid: int) -> str:
    """Return the letter of a process's state as in ``/proc/PID/stat``: "T" stopped, "Z" ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "Z"
    return stat[stat.rindex(")") + 2]
