"""Clocks for work that the caller has enqueued, which take no time themselves."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch


class HostClock:
    """Measures the seconds of calls within `measure`, which return when their work is done."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count the time of the calls within."""
        started = perf_counter()
        yield
        self._seconds += perf_counter() - started

    def take(self) -> float:
        """Return the seconds measured since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class DeviceClock(HostClock):
    """Measures the seconds that the caller's stream needs from one place to another.

    That is the time of the work enqueued within `measure`, its waits included. Two events are its
    ends; `take` reads those that have fired and waits for none.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._spans: deque[tuple[torch.Event, torch.Event]] = deque()

    def mark(self) -> torch.Event:
        """Return an event at the present end of the caller's stream."""
        event = torch.Event(self._device, enable_timing=True)
        torch.accelerator.current_stream(self._device).record_event(event)
        return event

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count the time of work enqueued on the current stream."""
        start = self.mark()
        yield
        self._spans.append((start, self.mark()))

    def take(self) -> float:
        """Return the seconds of what has ended since the last call."""
        while self._spans and self._spans[0][1].query():
            start, end = self._spans.popleft()
            self._seconds += start.elapsed_time(end) / 1e3
        return super().take()
