"""Place of a rank in its program, as other ranks see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zero_core.watch.step_clock import StepClock

OUTSIDE = "the program outside of the engine"
"""`Place.doing` between two calls of the engine."""

UPDATE = "the wait for updated parameters"
"""`Place.doing` while the state tier has not published what is needed next."""


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
        """Be at ``doing`` in this context, and afterwards where it was before."""
        before = self.doing
        self.enter(doing)
        try:
            yield
        finally:
            self.enter(before)
