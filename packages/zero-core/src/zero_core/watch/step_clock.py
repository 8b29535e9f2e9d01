"""Times of a step: where the program was, what it waited for, and what was under way meanwhile.

On a host a mark is the time of `time.perf_counter`. On an accelerator it is an event on the current
stream, so that the times are those of the device: a wait is the time in which its stream waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import torch

from zero_core.watch.place import OUTSIDE

Mark = float | torch.Event


class Span(NamedTuple):
    """A part of a step.

    Attributes:
        doing: the place, as of `zero_core.watch.place.Place.doing`.
        waits_for: the collective that it waits for there, or an empty string.
        start: seconds since the step began.
        stop: seconds since then.
    """

    doing: str
    waits_for: str
    start: float
    stop: float


class StepClock:
    """Notes each change of a `Place`. It belongs to the thread that the place belongs to."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_host = device.type == "cpu"
        # A copy stream may be the current one at a mark: the times are those of the computation.
        self._stream = None if self._is_host else torch.accelerator.current_stream(device)
        self._marks: list[tuple[str, str, Mark]] = []
        self._under_way: dict[str, float] = {}
        self._carried: list[tuple[str, float, float]] = []
        self.restart(OUTSIDE)

    def restart(self, doing: str) -> None:
        """Begin a step at the place ``doing``."""
        self._marks = [(doing, "", self._now())]
        self._carried = []

    def enter(self, doing: str) -> None:
        if doing != self._marks[-1][0]:
            self._marks.append((doing, "", self._now()))

    def begin_wait(self, what: str) -> None:
        self._marks.append((self._marks[-1][0], what, self._now()))

    def end_wait(self) -> None:
        doing, what, _ = self._marks[-1]
        self._marks.append((doing, "", self._now()))
        started = self._under_way.pop(what, None)
        if started is not None:
            self._carried.append((what, started, perf_counter()))

    def launch(self, what: str) -> None:
        """Note that the collective ``what`` starts. It is under way until it has been waited for.

        Of a name that is launched again before, the first counts.
        """
        if self._is_host:
            self._under_way.setdefault(what, perf_counter())

    def take(self) -> StepMarks:
        """End the step and begin the next one at the same place."""
        marks, carried = self._marks, self._carried
        end = self._now()
        marks.append(("", "", end))
        self._marks = [(marks[-2][0], "", end)]
        self._carried = []
        return StepMarks(marks, carried)

    def _now(self) -> Mark:
        if self._is_host:
            return perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(self._stream)
        return event


class StepMarks:
    """The marks of one step."""

    def __init__(
        self, marks: Sequence[tuple[str, str, Mark]], carried: Sequence[tuple[str, float, float]]
    ) -> None:
        self._marks = marks
        self._carried = carried

    def spans(self) -> list[Span]:
        """Return the parts of the step, in order. On an accelerator, wait for its end."""
        end = self._marks[-1][2]
        if isinstance(end, torch.Event):
            end.synchronize()
        times = [self._since_start(mark) for _, _, mark in self._marks]
        names = [(doing, what) for doing, what, _ in self._marks]
        return [
            Span(*name, start, stop)
            for name, start, stop in zip(names, times, times[1:], strict=False)
        ]

    def under_way(self) -> list[tuple[str, float, float]]:
        """Return name, start and stop of each collective that was waited for in this step.

        Seconds since the step began; one that the step before started has a negative start. There
        are none on an accelerator.
        """
        begin = self._marks[0][2]
        if isinstance(begin, torch.Event):
            return []
        return [(what, start - begin, stop - begin) for what, start, stop in self._carried]

    def of_events(self, begun: torch.Event, ended: torch.Event) -> tuple[float, float]:
        """Return start and stop of the work between two events, in seconds since the step began.

        Wait for the second. On an accelerator alone.
        """
        begin = self._marks[0][2]
        assert isinstance(begin, torch.Event)
        ended.synchronize()
        return begin.elapsed_time(begun) / 1e3, begin.elapsed_time(ended) / 1e3

    def since_start(self, time: float) -> float | None:
        """Return seconds since the step began of a `time.perf_counter`, on a host."""
        begin = self._marks[0][2]
        return None if isinstance(begin, torch.Event) else time - begin

    def _since_start(self, mark: Mark) -> float:
        begin = self._marks[0][2]
        if isinstance(mark, torch.Event):
            assert isinstance(begin, torch.Event)
            return begin.elapsed_time(mark) / 1e3
        assert isinstance(begin, float)
        return mark - begin
