"""The times of a step by activity (`zero_core.comm.place`), and the memory held meanwhile.

A *mark* is a point in time. On a host it is a value of `time.perf_counter`. On an accelerator it is
an event on the computation's stream, so a wait lasts as long as the stream waits.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from time import perf_counter
from typing import Any

import torch

Mark = float | torch.Event
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class MemoryMeter:
    """Meter of this rank's memory: allocated on its accelerator, or resident on the host."""

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
        """Return the peak in bytes. On a host, at least ``held``, the bytes held now."""
        if not self._is_host:
            return int(torch.accelerator.max_memory_allocated(self._device))
        with suppress(ImportError):
            import resource

            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            # The reported peak may lag behind the current value.
            return max(held, peak if sys.platform == "darwin" else peak * 1024)
        return held

    def close(self) -> None:
        if self._statm is not None:
            os.close(self._statm)
            self._statm = None


class StepClock:
    """Record of the changes of a `Place` in one step, not thread-safe."""

    def __init__(
        self, device: torch.device, doing: str, launched: dict[str, float], begin: Mark | None
    ) -> None:
        """``begin``: the end of the previous step, or None for the current time.

        ``launched``: on a host, start times, by name, of collectives that nobody has waited for.
        """
        self._device = device
        self._is_host = device.type == "cpu"
        # Use the computation's stream, because a copy stream may be current at a mark.
        self._stream = None if self._is_host else torch.accelerator.current_stream(device)
        self._marks: list[tuple[str, str, Mark]]
        self._marks = [(doing, "", self._now() if begin is None else begin)]
        self._launched = launched
        self.under_way: list[tuple[str, Mark, Mark]] = []  # on a host: collective, start and end
        # At each change of the place: seconds since the step began, bytes held, and place. Empty if
        # not recorded.
        self.trail: list[tuple[float, int, str]] = []
        self._memory: MemoryMeter | None = None
        self._begun = 0.0  # start of the trail

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
        """Record the start of collective ``what``, on a host, if none of that name is pending."""
        if self._is_host:
            self._launched.setdefault(what, perf_counter())

    def end(self) -> Mark:
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
        """Return the seconds from the step's beginning to ``mark``, a mark of the same device."""
        begin: Any = self._marks[0][2]
        return begin.elapsed_time(mark) / 1e3 if isinstance(begin, torch.Event) else mark - begin

    def spans(self) -> list[tuple[str, str, float, float]]:
        """Return the intervals of a step, after `end`. On an accelerator, waits for the last mark.

        Each is (place, collective waited for or "", start, stop), in seconds since the first mark.
        """
        *_, end = self._marks[-1]
        if isinstance(end, torch.Event):
            end.synchronize()
        times = [self.seconds(mark) for *_, mark in self._marks]
        return [
            (doing, what, start, stop)
            for (doing, what, _), start, stop in zip(self._marks, times, times[1:], strict=False)
        ]
