"""Place of a rank in its program, as other ranks see it, and the times of a step by place.

On a host a mark is the time of `time.perf_counter`. On an accelerator it is an event on the current
stream, so that the times are those of the device: a wait is the time in which its stream waits.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any

import torch

# `Place.doing` between two calls of the engine, and while the state tier has not published what is
# needed next.
OUTSIDE = "the program outside of the engine"
UPDATE = "the wait for updated parameters"

Mark = float | torch.Event
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class Place:
    """Place of this rank in its program. The main thread writes it, that of heartbeats reads it."""

    __slots__ = ("clock", "doing", "num_changes", "num_steps", "unfinished", "waits_for")

    def __init__(self) -> None:
        self.doing = OUTSIDE  # such as "forward of unit 3 (blocks.2)"
        self.num_steps = 0  # steps that have ended
        self.waits_for = ""  # the collective that the host waits for, or an empty string
        self.num_changes = 0  # grows with each change of the others
        self.clock: StepClock | None = None  # notes the times, while steps are recorded
        self.unfinished = ""  # change of values under way or left in the middle, as "step()"

    def enter(self, doing: str) -> None:
        self.doing = doing
        self.num_changes += 1
        if self.clock is not None:
            self.clock.enter(doing)

    def begin_wait(self, what: str) -> None:
        self.waits_for = what
        self.num_changes += 1
        if self.clock is not None:
            self.clock.begin_wait(what)

    def end_wait(self) -> None:
        self.waits_for = ""
        self.num_changes += 1
        if self.clock is not None:
            self.clock.end_wait()

    def check_finished(self, what: str) -> None:
        """Refuse ``what`` by a RuntimeError if a change of values was left in the middle."""
        if self.unfinished:
            raise RuntimeError(
                f"{what} after {self.unfinished} was left in the middle by an exception: "
                "parameters and optimizer states may be half-updated. Load a checkpoint on every "
                "rank, by engine.load_checkpoint() or engine.resume()"
            )

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Wait for other ranks in this context, for ``what`` the program exchanges itself."""
        self.begin_wait(what)
        try:
            yield
        finally:
            self.end_wait()

    @contextmanager
    def during(self, doing: str) -> Iterator[None]:
        before = self.doing
        self.enter(doing)
        try:
            yield
        finally:
            self.enter(before)


class MemoryMeter:
    """Bytes that this rank holds: on its accelerator, or resident on a host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_host = device.type == "cpu"
        self._statm: int | None = None
        if self._is_host:
            with suppress(OSError):
                self._statm = os.open("/proc/self/statm", os.O_RDONLY)

    def held(self) -> int:
        if self._statm is not None:
            return int(os.pread(self._statm, 64, 0).split()[1]) * _PAGE
        if self._is_host:
            return self.peak(0)
        return int(torch.accelerator.memory_allocated(self._device))

    def peak(self, held: int) -> int:
        """Return the most so far, or ``held`` where the system does not know."""
        if not self._is_host:
            return int(torch.accelerator.max_memory_allocated(self._device))
        with suppress(ImportError):
            import resource

            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            # The system's own count may lag behind.
            return max(held, peak if sys.platform == "darwin" else peak * 1024)
        return held

    def close(self) -> None:
        if self._statm is not None:
            os.close(self._statm)
            self._statm = None


class StepClock:
    """Notes each change of a `Place` in one step. It belongs to the thread of the place."""

    def __init__(
        self, device: torch.device, doing: str, launched: dict[str, float], begin: Mark | None
    ) -> None:
        """``begin``: the end of the step before, None for now.

        ``launched``: on a host, when the collectives began that no step has waited for yet.
        """
        self._device = device
        self._is_host = device.type == "cpu"
        # A copy stream may be the current one at a mark: the times are those of the computation.
        self._stream = None if self._is_host else torch.accelerator.current_stream(device)
        self._marks: list[tuple[str, str, Mark]]
        self._marks = [(doing, "", self._now() if begin is None else begin)]
        self._launched = launched
        self.under_way: list[tuple[str, Mark, Mark]] = []  # collectives, on a host
        # Seconds since the step began, bytes held, and place, at each change of the place; empty
        # where these are not noted.
        self.trail: list[tuple[float, int, str]] = []
        self._memory: MemoryMeter | None = None
        self._begun = 0.0  # of the trail

    def begin_trail(self, begun: float, memory: MemoryMeter) -> None:
        self._begun, self._memory = begun, memory
        self.trail.append((0.0, memory.held(), self._marks[0][0]))

    def enter(self, doing: str) -> None:
        if self._memory is not None and doing != self.trail[-1][-1]:
            self.trail.append((perf_counter() - self._begun, self._memory.held(), doing))
        if doing != self._marks[-1][0]:
            self._marks.append((doing, "", self._now()))

    def begin_wait(self, what: str) -> None:
        self._marks.append((self._marks[-1][0], what, self._now()))

    def end_wait(self) -> None:
        doing, what, _ = self._marks[-1]
        self._marks.append((doing, "", self._now()))
        started = self._launched.pop(what, None)
        if started is not None:
            self.under_way.append((what, started, perf_counter()))

    def launch(self, what: str) -> None:
        """Note that the collective ``what`` starts. Of starts without a wait the first counts."""
        if self._is_host:
            self._launched.setdefault(what, perf_counter())

    def end(self) -> Mark:
        """End the step, and return its end."""
        end = self._now()
        self._marks.append(("", "", end))
        return end

    def _now(self) -> Mark:
        if self._is_host:
            return perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(self._stream)
        return event

    def seconds(self, mark: Any) -> float:
        """Return the seconds from the step's begin to ``mark``, which is of the same kind."""
        begin: Any = self._marks[0][2]
        return begin.elapsed_time(mark) / 1e3 if isinstance(begin, torch.Event) else mark - begin

    def spans(self) -> list[tuple[str, str, float, float]]:
        """Return the parts of a step that has ended. On an accelerator, wait for its end.

        Each is its place, the collective that it waits for or an empty string, start and stop.
        """
        *_, end = self._marks[-1]
        if isinstance(end, torch.Event):
            end.synchronize()
        times = [self.seconds(mark) for *_, mark in self._marks]
        return [
            (doing, what, start, stop)
            for (doing, what, _), start, stop in zip(self._marks, times, times[1:], strict=False)
        ]
