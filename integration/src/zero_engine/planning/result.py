"""Plan with times: plain frozen data, as JSON or as tables of text.

[Note: lanes]
compute  forward, recomputation, backward and the device's update
gather   gathers of parameters
reduce   reductions of gradients, and the step's small all-reduce
copies   between a device and its host
host     the host's update
file     reads and writes of NVMe offload

A lane's seconds are the sum of its work. Lanes overlap, so their sum can exceed the step. If ranks
compute on the CPU, the computing thread also copies data of the same node: the lane is then
"gather" or "reduce", and the copy delays "compute".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from zero_core.footprint import Choice, Plan, Table

LANES = ("compute", "gather", "reduce", "copies", "host", "file")


@dataclass(frozen=True)
class Span:
    """Time ``[start_s, stop_s)`` of a step in which a lane is busy with ``what``."""

    lane: str
    what: str
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class StepTime:
    """Predicted time of one optimizer step in steady state, all micro-steps included.

    Attributes:
        total_s: seconds from one step's end to the next one's.
        lanes: busy seconds of each of `LANES`.
        samples: samples of the step, over all ranks.
        spans: work of the lanes in one step, by start.
    """

    total_s: float
    lanes: Mapping[str, float]
    samples: int
    spans: tuple[Span, ...] = ()

    @property
    def bound(self) -> str:
        """Lane with the most busy seconds."""
        return max(LANES, key=lambda lane: self.lanes[lane])

    @property
    def bound_s(self) -> float:
        return self.lanes[self.bound]

    @property
    def sample_s(self) -> float:
        return self.total_s / self.samples


@dataclass(frozen=True)
class TimedChoice(Choice):
    """Configuration of the run, with its bytes per rank and the time of its step.

    Attributes:
        step_time: the predicted time, with a calibration and example inputs. Varied choices have
            one only if they fit.
    """

    step_time: StepTime | None = None

    @property
    def sample_s(self) -> float:
        """Predicted seconds per sample, infinite without a prediction."""
        return math.inf if self.step_time is None else self.step_time.sample_s


@dataclass(frozen=True)
class TimedPlan(Plan):
    """Bytes of a run per rank, and the time of its step.

    Attributes:
        best: with a calibration the fastest choice that fits; see `zero_engine.planning.search`.
        reasons: with a calibration, sentences that explain ``best``.
    """

    configured: TimedChoice
    choices: tuple[TimedChoice, ...]
    best: TimedChoice | None
    reasons: tuple[str, ...] = ()

    @property
    def step_time(self) -> StepTime | None:
        """Predicted time of a step as configured, with a calibration and example inputs."""
        return self.configured.step_time

    def to_json(self) -> str:
        """Return a JSON object. Only the configured choice has spans."""
        content = asdict(self)
        for choice in (*content["choices"], content["best"]):
            if choice is not None and choice["step_time"] is not None:
                del choice["step_time"]["spans"]
        return json.dumps(content, indent=2)

    @property
    def marked(self) -> dict[str, TimedChoice]:
        """Simplest and fastest choice that fit the given memory and round no more."""
        is_limited = self.device_memory is not None or self.host_memory is not None
        fitting = [c for c in self.choices if c.is_fitting and not c.placement.is_rounding]
        if not fitting or not is_limited:
            return {}
        order = [(len(c.placement.settings), c.ratio, c.is_varied, c.stage) for c in fitting]
        found = {"simplest": fitting[order.index(min(order))]}
        fastest = min(fitting, key=lambda c: c.sample_s)
        return found | ({} if fastest.step_time is None else {"fastest": fastest})

    @property
    def headline(self) -> str:
        """Names of the marked choices, or ""."""
        return "".join(f"; {mark} that fits: {choice}" for mark, choice in self.marked.items())

    def tables(self, most_choices: int = 1000) -> tuple[Table, ...]:
        """Return the tables. Of more than ``most_choices``, the marked and the first are shown."""
        by_time = sorted(self.choices, key=lambda c: (c.is_varied, c.is_varied and c.sample_s))
        ordered = replace(self, choices=tuple(by_time))
        *others, choices = Plan.tables(ordered)
        times = {c.key: c.step_time for c in self.choices}
        marks = {self.configured.key: "configured"}
        for mark, choice in self.marked.items():
            marks[choice.key] = ", ".join(filter(None, (marks.get(choice.key), mark)))
        rows: list[tuple[str, ...]] = []
        for row, shown in zip(choices.rows, ordered.shown_choices(), strict=True):
            t = times[shown.key]
            cell = ("-", "-") if t is None else (_seconds(t.total_s), t.bound)
            if len(rows) < most_choices or shown.key in marks:
                rows.append((*row, *cell, marks.get(shown.key, "")))
        if (time := self.step_time) is not None:
            busy = [
                (lane, _seconds(time.lanes[lane]), f"{time.lanes[lane] / time.total_s:.0%}")
                for lane in LANES
            ]
            busy.append(("step", _seconds(time.total_s), "100%"))
            heads = ("lane", "busy", "of the step")
            others.append(Table("Predicted step", heads, tuple(busy)))
        hidden = len(choices.rows) - len(rows)
        title = f"Choices, {hidden} more by --all" if hidden else "Choices"
        return (*others, Table(title, (*choices.headings, "step", "bound", ""), tuple(rows)))


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"
