"""Current activity of a rank, as other ranks see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zero_core.comm.clock import StepClock

# Values of `Place.doing`: between two calls of the engine, and while the state tier has not yet
# published parameters that are needed next.
OUTSIDE = "the program outside of the engine"
UPDATE = "the wait for updated parameters"


class Place:
    """Current activity of this rank, which the heartbeat thread publishes."""

    __slots__ = ("clock", "doing", "num_changes", "num_steps", "unfinished", "waits_for")

    def __init__(self) -> None:
        self.doing = OUTSIDE  # such as "forward of unit 3 (blocks.2)"
        self.num_steps = 0  # number of ended steps
        self.waits_for = ""  # the collective that the host waits for, or ""
        self.num_changes = 0  # increases when an activity or a wait starts or ends
        self.clock: StepClock | None = None  # records times, while steps are recorded
        self.unfinished = ""  # running or interrupted change of values, such as "step()"

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
        """Raise RuntimeError for the call ``what`` if a change of values was interrupted."""
        if self.unfinished:
            raise RuntimeError(
                f"{what} after {self.unfinished} was left in the middle by an exception: "
                "parameters and optimizer states may be half-updated. Load a checkpoint on every "
                "rank, by engine.load_checkpoint() or engine.resume()"
            )

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Mark the context as a wait for other ranks in the exchange ``what``."""
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
