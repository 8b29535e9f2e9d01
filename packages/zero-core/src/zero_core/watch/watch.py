"""Publishes where this rank is, and logs whom it waits for once a wait is long.

One thread of the process serves all engines. [Note: which rank the others wait for] in
`zero_core.watch.beats` has the rules. No lock is held, and no thread but that of the board waits,
while the store is asked.

[Note: reads of many ranks]
All ranks that wait read beats from one store. So each reads those of at most `_WINDOW` ranks at a
time, at first of the next ones behind it: a rank that stops is named in time by the ranks before
it. Once a line is due it goes on to the next window with each read, and reads the more seldom the
longer it waits. Only what can be said of single ranks is said before all were read.

gloo raises where a collective is waited for. NCCL's ``wait`` returns at once, and a rank that hangs
shows in torch's own watchdog alone, as a number of a collective. There `DeviceWaits` knows which
collective the device waits for, and the thread asks it.
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

import torch

from zero_core.watch.beats import Beat, ThreadedBoard, Verdict, Wait, process_namespace
from zero_core.watch.notices import write_error_file
from zero_core.watch.place import OUTSIDE, Place

_log = logging.getLogger(__name__)

# Shares of ``within_s``: between two beats; of a wait before others are observed; without a beat
# before a rank is without a sign of life; of a wait before a line is logged.
_BEAT, _OBSERVE, _SILENCE, _LOG = 0.1, 0.3, 0.3, 0.7
_MIN_SILENCE_S = 0.5
_LONG = 6  # what touches disks is named so many times later, if its rank is alive
_LONG_PHASES = ("build", "save_checkpoint", "load_checkpoint", "export", "checkpoint:")
_WINDOW = 64  # ranks whose beats are read at once
_READ = 1 / 16  # share of a long wait between two reads
_FLUSH_S = 1.0  # longest wait for a beat that says how this rank failed or ended
_NUM_WATCHED = 1024  # collectives of a device at once: hosts do not run further ahead
_LAST_WAIT_S = 10.0  # longest wait of an engine that ends for collectives under way


class DeviceWaits:
    """Collectives that the streams of one device wait for, where the host does not.

    An event is recorded behind each of them, on the stream that waits for it. The events of a CUDA
    graph that is being captured cannot be queried: nothing is noted then. During a capture in mode
    "global" no other thread may query any event: see docs/clusters.md.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._waited: deque[tuple[str, torch.Event]] = deque(maxlen=_NUM_WATCHED)
        self._has_failed = False

    def note(self, name: str) -> None:
        """Note that the current stream waits for the collective ``name``."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        event = torch.accelerator.current_stream(self._device).record_event()
        with self._lock:
            if len(self._waited) % 64 == 0:
                self._drop_ended()
            if not self._has_failed:
                self._waited.append((name, event))

    def oldest(self) -> tuple[str, torch.Event] | None:
        """Return the oldest collective that has not ended. Any thread may call it."""
        torch.accelerator.set_device_index(self._device)  # a thread begins on the first one
        with self._lock:
            self._drop_ended()
            return self._waited[0] if self._waited else None

    def close(self) -> None:
        """Return when what was noted has ended, has had its time, or never will end."""
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
        except RuntimeError as error:  # every later call to the device raises the same
            _log.error(
                "%s has failed: %s. These collectives may not have ended: %s",
                self._device,
                error,
                "; ".join(name for name, _ in self._waited),
            )
            self._has_failed = True
            self._waited.clear()


class Watch:
    """Watches the waits of one engine. See the top of this file."""

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
        """Publish the first beat. ``within_s`` 0: publish failures alone, and log nothing."""
        self.interval_s = _BEAT * within_s
        self.device_waits = device_waits
        self._board = board
        # Not at the exit: a last beat says how a process ends.
        weakref.finalize(self, board.close).atexit = False
        self._place = place
        self._rank = rank
        self._world_size = world_size
        self._within_s = within_s
        self._silence_s = max(_SILENCE * within_s, _MIN_SILENCE_S)
        self._namespace = process_namespace()
        self._number = 0
        self._cause = ""
        self._has_given_up = False
        self._has_misread = False
        self._lock = threading.Lock()
        self._last_tick = time.monotonic()
        self._still = (-1, self._last_tick)  # the place's number of changes, and since when
        self._wait = Wait(rank, world_size, None, self._last_tick)
        self._publish(self._last_tick)

    # ------------------------------------------------------------------ thread

    def tick(self, now: float) -> None:
        """Publish a beat at ``now``, and log whom this rank waits for if it has for long."""
        with self._lock:
            self._publish(now)
            identity, what = self._find_wait()
            if identity != self._wait.identity:
                self._wait = Wait(self._rank, self._world_size, identity, self._last_tick)
            waited_s = now - self._wait.since
            is_due = waited_s >= _LOG * self._within_s
            self._add_answers(now)
            if identity is not None and waited_s >= _OBSERVE * self._within_s:
                if now - self._wait.last_read >= _READ * waited_s:
                    self._wait.window += is_due
                    self._request(now)
                verdict = self._judge() if is_due else None
                logged = self._wait.logged
                before = logging.INFO if logged is None else logged.level
                if verdict is not None and verdict.level > before:
                    self._log(what, waited_s, verdict)
            self._last_tick = now

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
                self._wait.add(rank, Beat.from_json(text), now)
            except ValueError as error:
                if not self._has_misread:
                    _log.warning("the beat of rank %d cannot be read: %s", rank, error)
                self._has_misread = True

    def _find_wait(self) -> tuple[object, str]:
        """Return the identity and the name of the wait under way. Those of the host are first."""
        place = self._place
        what, number = place.waits_for, place.num_changes
        if what:
            return number, what
        oldest = None if self.device_waits is None else self.device_waits.oldest()
        return (None, "") if oldest is None else (oldest, oldest[0])

    def _log(self, what: str, waited_s: float, verdict: Verdict) -> None:
        is_error = verdict.level >= logging.ERROR
        is_patient = not is_error and any(phase in verdict.text for phase in _LONG_PHASES)
        if is_patient and waited_s < _LONG * self._within_s:
            return
        self._wait.logged = verdict
        line = f"rank {self._rank}: {what} has not ended for {waited_s:.1f} s: {verdict.text}"
        _log.log(verdict.level, "%s", line)
        if is_error and not self._place.waits_for:
            write_error_file("CollectiveError", line)  # the library ends this process in silence

    def _judge(self) -> Verdict | None:
        silence_s = _SILENCE * self._within_s or math.inf
        verdict = self._wait.judge(silence_s=silence_s, patience_s=_LOG * self._within_s)
        if verdict is not None and verdict.is_final:
            return verdict
        board = self._board  # its store may be the cause, too
        if board.is_lost:
            return Verdict(f"no connection to {board.host} any more", logging.WARNING, True)
        unanswered_s = board.unanswered_s()
        if unanswered_s < self._silence_s:
            return verdict
        text = f"{board.host} has not answered for {unanswered_s:.1f} s (process or network)"
        return Verdict(text, logging.ERROR, True)

    # ------------------------------------------------------------- both threads

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

    # -------------------------------------------------------------- main thread

    def note_cause(self, cause: str) -> None:
        """Have the others' errors name ``cause`` of this rank. An empty string takes it back."""
        with self._lock:
            self._cause = cause
            self._publish(time.monotonic())
        if cause:
            self._board.flush(_FLUSH_S)  # this process may end now

    def explain(self) -> str:
        """Say which rank made this one fail in a collective. It may wait for a silence."""
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
        # Ranks that waited for each other give up at once: what was logged before has the cause.
        known = [found for found in (verdict, logged) if found is not None]
        return max(known, key=lambda found: found.level).text if known else ""

    # ------------------------------------------------------------- any thread

    def find_dead(self, ranks: Sequence[int]) -> str:
        """Say which of ``ranks`` have ended, or were silent for long. To be asked every second."""
        silence_s = _LONG * self._within_s or math.inf
        with self._lock:
            self._add_answers(time.monotonic())
            self._board.request(ranks)
            return self._wait.dead(ranks, silence_s)

    def close(self, how: str) -> None:
        """End: this rank publishes no beats any more. ``how`` it ended is what others read."""
        with _lock:
            _watches.discard(self)
        self.note_cause(how)


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None
_is_exiting = threading.Event()


def start(watch: Watch) -> None:
    """Have the thread of this process serve ``watch`` until its end."""
    global _thread
    with _lock:
        _watches.add(watch)
        if _thread is None:
            # A daemon: it must not keep the process from ending.
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
        _tick_all()  # in a call: this thread keeps no watch while it sleeps


def _tick_all() -> None:
    with _lock:
        watches = list(_watches)
    for watch in watches:
        watch.tick(time.monotonic())


def _end() -> None:
    """End the thread before the interpreter does, and say how this process ends."""
    thread = _thread
    _is_exiting.set()
    if thread is not None:
        thread.join(2.0)
    error = getattr(sys, "last_value", None)  # foreign: the interpreter's, of an uncaught error
    how = "its program has ended" if error is None else f"{type(error).__name__}: {error}"
    for watch in list(_watches):
        watch.close(how)


atexit.register(_end)
