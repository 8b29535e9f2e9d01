"""Heartbeats of ranks. With them, log lines and errors name the rank that others wait for.

One thread per process serves all engines. It does not call the store that holds the heartbeats.

[Note: which rank the others wait for]
A thread of each rank publishes a beat every tenth of the configured time. A stopped or dead process
publishes none, and neither does one whose interpreter is blocked. A rank that waits for long reads
beats of other ranks repeatedly and compares them. It measures times by its own clock, because
clocks of hosts may differ.

1. A rank that failed, ended, or publishes no beats is the cause, unless it failed while waiting.
2. Otherwise, if any rank has made progress meanwhile, nothing is reported: slow steps are healthy.
3. Otherwise a rank that waits for no other rank is the cause. It is busy with one activity, which
   may be healthy.
4. Otherwise all ranks wait. If they wait for different collectives, they took different branches.

gloo raises after its timeout in the wait for a collective. NCCL's ``wait`` returns immediately, and
torch's watchdog reports only a collective's number. So `DeviceWaits` records which collective the
device waits for. The heartbeat thread ends the process if such a wait is too long.

[Note: stores that do not answer]
A request to a store whose host is stopped blocks forever, whatever the store's timeout: torch
cancels the request, and then waits without limit for the reply to the cancellation. So only the
thread of a `ThreadedBoard` calls the store. Other threads read its last results, and how long its
current call has taken. A store that does not answer also counts as a cause.

[Note: reads of many ranks]
All waiting ranks read beats from one store. So each reads its own beat and those of at most
`_WINDOW` other ranks at a time, first of the ranks after it. A stopped rank is thus named in time
by the ranks before it. When a log line is due, each further read uses the next window. The time
between reads grows with the wait. Until all windows were read, cases 3 and 4 are not reported.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zero_core.comm.notices import write_error_file
from zero_core.comm.place import OUTSIDE, Place

_log = logging.getLogger(__name__)

OTHER_BLOCKS = (
    "Every rank must make the same calls of the engine, as forwards and saves, in the same order. "
    "If a rank calls blocks that others do not call, as experts, name the module that holds them "
    "in zero_optimization.leaf_module"
)
_MAX_NAMED = 4  # maximum number of ranks or statements in a message
_ENDED = ("Z", "X")
_STOPPED = {"T": "its process is stopped", "t": "a debugger holds its process"}
# Shares of the configured time: the interval of beats, the wait before other ranks are observed,
# the time without a beat before a rank counts as silent, the wait before a line is logged.
_BEAT, _OBSERVE, _SILENCE, _LOG = 0.1, 0.3, 0.3, 0.7
_MIN_SILENCE_S = 0.5
_LONG = 6  # factor on ``within_s`` for ranks that may be compiling or using a disk
_LONG_PHASES = ("build", "save_checkpoint", "load_checkpoint", "export", "checkpoint:")
_WINDOW = 64  # number of ranks whose beats are read at once
_READ = 1 / 16  # minimum time between two reads, as a share of the wait so far
_FLUSH_S = 1.0  # longest wait for a beat that reports a failure or end
_MAX_TICK = 3  # maximum time that one tick adds to a wait, in intervals of beats
_NUM_WATCHED = 1024  # maximum number of watched collectives of a device
_LAST_REPORT_S = 2.0  # wait for torch's report of a timeout, before this process ends
_LAST_WAIT_S = 10.0  # longest wait for pending collectives when an engine ends


class Beat(NamedTuple):
    """State that a rank publishes."""

    number: int  # increases with each beat
    place: str  # `zero_core.comm.place.Place.doing`, with the step
    waits_for: str  # the collective that the rank waits for, with the step, or ""
    num_changes: int  # `Place.num_changes`
    still_s: float  # time since ``num_changes`` last changed
    cause: str  # the rank's own error that makes others wait in vain, or how it ended
    has_given_up: bool  # whether the rank failed while waiting for another rank
    pid: int
    namespace: str  # namespace of ``pid``

    @classmethod
    def from_json(cls, text: str) -> Beat:
        values = json.loads(text)
        types = [int, str, str, int, float, str, bool, int, str]
        if not isinstance(values, list) or list(map(type, values)) != types:
            raise ValueError(f"expected the state of a rank of this version, found {text:.200}")
        return cls(*values)


class Verdict(NamedTuple):
    """Explanation of why a rank waits."""

    text: str  # names ranks or the store, or says that the cause is unknown
    level: int  # of `logging`: INFO if other ranks only gave up before this one
    is_final: bool  # whether waiting longer would not change it


@dataclass
class _Seen:
    """A rank's last beat, when it was read, and when its number and num_changes last changed."""

    beat: Beat
    at: float
    since: float
    place_since: float

    @property
    def silent_s(self) -> float:  # up to the last read
        return self.at - self.since

    @property
    def still_s(self) -> float:
        return self.beat.still_s + self.silent_s


@dataclass
class _Wait:
    """A wait of this rank, and the beats of all ranks read since the wait began."""

    identity: object  # identity of this wait, None if this rank does not wait
    since: float
    watched_s: float = 0.0  # shorter than the wait if this process was suspended meanwhile
    last_read: float = -math.inf
    window: int = 0  # number of the window being read
    logged: Verdict | None = None
    seen: dict[int, _Seen] = field(default_factory=dict)  # by rank


def _failure(rank: int, seen: _Seen, silence_s: float) -> str:
    """Describe how a rank failed, ended or fell silent, or return ""."""
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
    """Access to beats in a store, by a thread, so that a store that hangs blocks no caller."""

    def __init__(self, store: Any, host: str, keys: Sequence[str], rank: int) -> None:
        """``keys``: key of each rank's beat. ``host``: description of the store's host."""
        self.host = host
        self.is_lost = False  # whether the connection has failed, which ends the thread
        self._store = store
        self._keys = keys
        self._rank = rank
        self._known: set[int] = set()  # ranks that have published a beat
        self._changed = threading.Condition()  # guards the attributes below
        self._beat: str | None = None  # the newest beat if not yet published
        self._ranks: Sequence[int] | None = None  # ranks whose beats are requested
        self._found: dict[int, str] = {}  # beats read, by rank
        self._busy_since: float | None = None  # start of the running calls of the store
        self._is_closed = False
        # A daemon thread, so that an unresponsive store does not keep the process from ending.
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
        """End the thread when nothing is pending."""
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
                if ranks is None:
                    continue
                # `multi_get` would wait for a key that was never set.
                unknown = [rank for rank in ranks if rank not in self._known]
                if unknown and self._store.check([self._keys[rank] for rank in unknown]):
                    self._known.update(unknown)
                else:
                    self._known.update(r for r in unknown if self._store.check([self._keys[r]]))
                there = [rank for rank in ranks if rank in self._known]
                beats = self._store.multi_get([self._keys[rank] for rank in there])
                with self._changed:
                    self._found |= {r: b.decode() for r, b in zip(there, beats, strict=True)}
        except RuntimeError:  # the store's host has ended, for example
            with self._changed:
                self.is_lost = True
                self._busy_since = None
                self._changed.notify_all()


def join_few(texts: list[str]) -> str:
    """Join the non-empty ``texts``. After the first few, only count the others."""
    said = list(filter(None, texts))
    more = [f"and {len(said) - _MAX_NAMED} more"] if len(said) > _MAX_NAMED else []
    return "; ".join(said[:_MAX_NAMED] + more)


def count_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1", "ranks 0, 2", or the first few ranks and the number of the others."""
    more = f" and {len(ranks) - _MAX_NAMED} more" if len(ranks) > _MAX_NAMED else ""
    named = ", ".join(map(str, ranks[:_MAX_NAMED]))
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {named}{more}"


def process_namespace() -> str:
    """Return an identifier shared by processes whose pids are comparable, or ""."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def process_state(pid: int) -> str:
    """Return the state letter in ``/proc/PID/stat``: "T" stopped, "Z" ended or without a file."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "Z"
    return stat[stat.rindex(")") + 2]


class DeviceWaits:
    """Collectives that a device's streams wait for, while the host does not.

    An event is recorded after each wait, on the waiting stream. Nothing is recorded while a CUDA
    graph is captured, because such events cannot be queried. During a capture in mode "global" no
    other thread may query any event: see docs/clusters.md.
    """

    def __init__(self, device: torch.device, limit_s: float | None = None) -> None:
        self.limit_s = limit_s or math.inf  # longest wait, after which the process ends
        self._device = device
        self._lock = threading.Lock()
        self._waited: deque[tuple[str, torch.Event]] = deque(maxlen=_NUM_WATCHED)
        self.has_failed = False  # whether the device reports errors

    def note(self, name: str) -> None:
        """Record that the current stream waits for the collective ``name``."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        event = torch.accelerator.current_stream(self._device).record_event()
        with self._lock:
            if len(self._waited) % 64 == 0:
                self._drop_ended()
            if not self.has_failed:
                self._waited.append((name, event))

    def oldest(self) -> tuple[str, torch.Event] | None:
        """Return the oldest collective that has not ended. Any thread may call it."""
        torch.accelerator.set_device_index(self._device)  # a new thread uses device 0
        with self._lock:
            self._drop_ended()
            return self._waited[0] if self._waited else None

    def close(self) -> None:
        """Wait, for at most `_LAST_WAIT_S`, until all recorded collectives have ended."""
        deadline = time.monotonic() + _LAST_WAIT_S
        while time.monotonic() < deadline:
            with self._lock:
                self._drop_ended()
                if not self._waited:
                    return
            time.sleep(0.01)

    def _drop_ended(self) -> None:
        try:
            while self._waited and self._waited[0][1].query():
                self._waited.popleft()
        except RuntimeError as error:  # every later call to the device raises the same error
            text, names = f"{self._device} has failed: {error}", (name for name, _ in self._waited)
            _log.error("%s. These collectives may not have ended: %s", text, "; ".join(names))
            self.has_failed = True
            self._waited.clear()


class Watch:
    """Observer of one engine's waits. See [Note: which rank the others wait for]."""

    def __init__(
        self,
        board: ThreadedBoard,
        place: Place,
        *,
        rank: int,
        world_size: int,
        within_s: float,
        device_waits: DeviceWaits | None = None,
    ) -> None:
        """Publish the first beat. With ``within_s`` 0, do not `start` it: it has no interval."""
        self.interval_s = _BEAT * within_s
        self.device_waits = device_waits
        self._board = board
        # At exit the board stays open: a last beat must report how the process ends.
        weakref.finalize(self, board.close).atexit = False
        self._place = place
        self._rank = rank
        self._world_size = world_size
        self._within_s = within_s
        self._limit_s = math.inf if device_waits is None else device_waits.limit_s
        self._silence_s = max(_SILENCE * within_s, _MIN_SILENCE_S)
        self._namespace = process_namespace()
        self._number = 0
        self._cause = ""
        self._has_given_up = False
        self._has_misread = False
        self._lock = threading.Lock()
        self._last_tick = time.monotonic()
        self._still = (-1, self._last_tick)  # number of changes, and when it last grew
        self._wait = _Wait(None, self._last_tick)
        self._publish(self._last_tick)

    # ----------------------------------------------------- called by the heartbeat thread

    def tick(self, now: float) -> None:
        """Publish a beat. After a long wait, log its cause, or end the process (`DeviceWaits`)."""
        with self._lock:
            self._publish(now)
            identity, what = self._find_wait()
            if identity != self._wait.identity:
                self._wait = _Wait(identity, self._last_tick)
            else:
                self._wait.watched_s += min(now - self._last_tick, _MAX_TICK * self.interval_s)
            wait = self._wait
            waited_s = now - wait.since
            is_due = waited_s >= _LOG * self._within_s
            self._add_answers(now)
            if identity is not None and waited_s >= _OBSERVE * self._within_s:
                if now - wait.last_read >= _READ * waited_s:
                    wait.window += is_due
                    self._request(now)
                verdict = self._judge() if is_due else None
                before = logging.INFO if wait.logged is None else wait.logged.level
                if verdict is not None and verdict.level > before:
                    self._log(what, waited_s, verdict)
                # Only for a wait of the device: a wait of the host ends by raising an error.
                if isinstance(identity, tuple) and wait.watched_s >= self._limit_s:
                    self._abort(now, what)
            self._last_tick = now

    def _abort(self, now: float, what: str) -> None:
        wait = self._wait
        cause = "the cause is unknown" if wait.logged is None else wait.logged.text
        self._log(what, now - wait.since, Verdict(cause, logging.CRITICAL, True))
        self._has_given_up = True  # so that no other rank names this one as the cause
        self._publish(now)
        self._board.flush(_FLUSH_S)
        time.sleep(_LAST_REPORT_S)
        if self._find_wait()[0] is wait.identity:
            os.abort()  # the main thread may wait for the device in a call of the driver
        self._has_given_up = False
        _log.warning("rank %d: %s has ended after all, and training goes on", self._rank, what)

    def _request(self, now: float) -> None:
        self._wait.last_read = now
        others = self._world_size - 1
        num = min(_WINDOW, others)
        first = self._wait.window * num
        behind = (1 + (first + k) % others for k in range(num))
        self._board.request([self._rank, *((self._rank + d) % self._world_size for d in behind)])

    def _add_answers(self, now: float) -> None:
        for rank, text in self._board.take().items():
            try:
                beat = Beat.from_json(text)
            except ValueError as error:
                if not self._has_misread:
                    _log.warning("the beat of rank %d cannot be read: %s", rank, error)
                self._has_misread = True
                continue
            seen = self._wait.seen.setdefault(rank, _Seen(beat, now, now, now))
            if seen.beat.num_changes != beat.num_changes:
                seen.place_since = now
            if seen.beat.number != beat.number:
                seen.since = now
            seen.beat, seen.at = beat, now

    def _find_wait(self) -> tuple[object, str]:
        """Return identity and name of the current wait. Waits of the host take precedence."""
        place = self._place
        what, number = place.waits_for, place.num_changes
        if what:
            return number, what
        oldest = None if self.device_waits is None else self.device_waits.oldest()
        return (None, "") if oldest is None else (oldest, oldest[0])

    def _log(self, what: str, waited_s: float, verdict: Verdict) -> None:
        is_error = verdict.level >= logging.ERROR
        is_long = any(phase in verdict.text for phase in _LONG_PHASES)
        compiles = not self._place.num_steps and OUTSIDE not in verdict.text  # assumed in step 1
        if not verdict.is_final and (is_long or compiles) and waited_s < _LONG * self._within_s:
            return
        self._wait.logged = verdict
        line = f"rank {self._rank}: {what} has not ended for {waited_s:.1f} s: {verdict.text}"
        _log.log(verdict.level, "%s", line)
        if is_error and not self._place.waits_for:
            write_error_file("CollectiveError", line)  # torch may end this process silently

    def _judge(self) -> Verdict | None:
        """Return which rank, or the board's store, keeps this rank waiting, or None."""
        verdict, board = self._judge_ranks(), self._board
        if verdict is not None and verdict.is_final:
            return verdict
        if board.is_lost:
            return Verdict(f"no connection to {board.host} any more", logging.WARNING, True)
        unanswered_s = board.unanswered_s()
        if unanswered_s < self._silence_s:
            return verdict
        text = f"{board.host} has not answered for {unanswered_s:.1f} s (process or network)"
        return Verdict(text, logging.ERROR, True)

    def _judge_ranks(self) -> Verdict | None:
        """Return the verdict of [Note: which rank the others wait for].

        None if no rank failed and some rank made progress or was not read, or if all ranks wait for
        the same collective.
        """
        silence_s, found = _SILENCE * self._within_s or math.inf, sorted(self._wait.seen.items())
        others = {rank: seen for rank, seen in found if rank != self._rank}
        at_work = {rank: seen for rank, seen in others.items() if not seen.beat.has_given_up}
        failures = [_failure(rank, seen, silence_s) for rank, seen in at_work.items()]
        if any(failures):
            return Verdict(join_few(failures), logging.ERROR, True)
        busy = {rank: seen for rank, seen in at_work.items() if not seen.beat.waits_for}
        if (
            len(found) < self._world_size
            or any(seen.at - seen.place_since < silence_s for seen in at_work.values())
            or any(seen.still_s < _LOG * self._within_s for seen in busy.values())
        ):
            return None
        if busy:
            said = []
            for rank, seen in busy.items():
                place = seen.beat.place
                is_outside = place.startswith(OUTSIDE)
                more = " (evaluation, data or a file, if it is healthy)" if is_outside else ""
                said.append(f"rank {rank} has been in {place} for {seen.still_s:.1f} s{more}")
            return Verdict(join_few(said), logging.WARNING, False)
        if others and not at_work:
            return Verdict(f"{count_ranks(sorted(others))} gave up before", logging.INFO, True)
        waits: dict[str, list[int]] = {}
        for rank, seen in found:
            if seen.beat.waits_for and (rank == self._rank or rank in at_work):
                waits.setdefault(seen.beat.waits_for, []).append(rank)
        if len(waits) < 2:
            return None
        said = [f"{count_ranks(ranks)} in {what}" for what, ranks in waits.items()]
        text = f"the ranks took different branches. They wait: {join_few(said)}. {OTHER_BLOCKS}"
        return Verdict(text, logging.ERROR, True)

    # ----------------------------------------- called by the heartbeat and main threads

    def _publish(self, now: float) -> None:
        place = self._place
        if place.num_changes != self._still[0]:
            self._still = (place.num_changes, now)
        _, waits_for = self._find_wait()
        step = f" of step {place.num_steps + 1}"
        where = f", after step {place.num_steps}" if place.doing == OUTSIDE else step
        self._number += 1
        beat = Beat(
            self._number,
            place.doing + where,
            waits_for and waits_for + step,
            place.num_changes,
            now - self._still[1],
            self._cause,
            self._has_given_up,
            os.getpid(),
            self._namespace,
        )
        self._board.publish(json.dumps(beat))

    # ---------------------------------------------------------- called by the main thread

    def note_cause(self, cause: str) -> None:
        """Publish ``cause``, which other ranks' errors name. An empty string withdraws it."""
        with self._lock:
            self._cause = cause
            self._publish(time.monotonic())
        if cause:
            self._board.flush(_FLUSH_S)  # because this process may end now

    def explain(self) -> str:
        """Return which rank made a collective fail here, or "". Waits to detect silent ranks."""
        pause_s = min(max(self.interval_s, 0.01), 0.1)
        deadline = time.monotonic() + self._silence_s + 2 * self.interval_s
        with self._lock:
            self._has_given_up = True
            self._publish(time.monotonic())
        while True:
            now = time.monotonic()
            with self._lock:
                self._add_answers(now)
                verdict, logged = self._judge(), self._wait.logged
                if self._board.unanswered_s() == 0.0:
                    self._request(now)
            if now >= deadline or (verdict is not None and verdict.is_final):
                break
            time.sleep(pause_s)
        # If all other ranks gave up before, `verdict` names no cause, but `logged` may.
        known = [found for found in (verdict, logged) if found is not None]
        return max(known, key=lambda found: found.level).text if known else ""

    # ----------------------------------------------------------- called by any thread

    def find_dead(self, ranks: Sequence[int]) -> str:
        """Describe which of ``ranks`` ended or fell silent, by the beats read so far."""
        silence_s = _LONG * self._within_s or math.inf
        with self._lock:
            self._add_answers(time.monotonic())
            self._board.request(ranks)
            dead = {
                rank: seen
                for rank, seen in sorted(self._wait.seen.items())
                if rank in ranks and (_state_of(seen.beat) in _ENDED or seen.silent_s >= silence_s)
            }
            return join_few([_failure(rank, seen, silence_s) for rank, seen in dead.items()])

    def leave(self) -> None:
        """Publish the engine's end. With `DeviceWaits`, wait for collectives and other ranks.

        Pending collectives must end before the beat. Unless this rank failed, the other engines
        must end, too, because NCCL may still send them data. Each wait is at most `_LAST_WAIT_S`.
        """
        waits, others = self.device_waits, set[int]()
        if waits is not None:
            waits.close()
            if not (self._cause or self._has_given_up or waits.has_failed):
                others = {*range(self._world_size)} - {self._rank}
        self.close("its engine was closed")
        deadline = time.monotonic() + _LAST_WAIT_S
        while others and not self._board.is_lost and time.monotonic() < deadline:
            if self._board.unanswered_s() == 0.0:
                self._board.request([*others][:_WINDOW])
            time.sleep(0.05)
            with self._lock:
                self._add_answers(time.monotonic())
                seen = self._wait.seen.items()
                others -= {r for r, of in seen if _failure(r, of, math.inf)}

    def close(self, how: str) -> None:
        """Publish ``how`` the engine ended, and stop publishing."""
        with _lock:
            _watches.discard(self)
        self.note_cause(how)


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None
_is_exiting = threading.Event()


def start(watch: Watch) -> None:
    """Make the heartbeat thread of this process serve ``watch`` until `Watch.close`."""
    global _thread
    with _lock:
        _watches.add(watch)
        if _thread is None:
            # A daemon thread, which does not keep the process from ending.
            _thread = threading.Thread(target=_serve, name="zero_core watch", daemon=True)
            _thread.start()


def _serve() -> None:
    global _thread
    while True:
        with _lock:
            intervals = [watch.interval_s for watch in _watches]
            if not intervals:
                _thread = None
                return
        if _is_exiting.wait(min(intervals)):
            return
        _tick_all()  # in a function, so that this sleeping thread references no watch


def _tick_all() -> None:
    with _lock:
        watches = list(_watches)
    for watch in watches:
        watch.tick(time.monotonic())


def _end() -> None:
    """Stop the heartbeat thread, and publish how this process ends."""
    thread = _thread
    _is_exiting.set()
    if thread is not None:
        thread.join(2.0)
    error = getattr(sys, "last_value", None)  # foreign: set by the interpreter on an uncaught error
    how = "its program has ended" if error is None else f"{type(error).__name__}: {error}"
    for watch in list(_watches):
        watch.close(how)


atexit.register(_end)
