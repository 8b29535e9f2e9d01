"""A plan with times: plain frozen data, as JSON or as tables of text."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace

from zero_core.plan.result import Choice, Plan, Table
from zero_engine.planning.step_time import LANES, StepTime


@dataclass(frozen=True)
class TimedChoice(Choice):
    """One configuration of the same run, its bytes per rank and the time of its step.

    Attributes:
        step_time: the predicted time, with a calibration and example inputs. Choices that are
            varied have one only if they fit.
    """

    step_time: StepTime | None = None

    @property
    def sample_s(self) -> float:
        """Predicted seconds per sample. Infinite if unknown."""
        return math.inf if self.step_time is None else self.step_time.sample_s


@dataclass(frozen=True)
class TimedPlan(Plan):
    """Bytes that a run takes per rank, and the time of its step.

    Attributes:
        best: with a calibration the fastest choice that fits; see `zero_engine.planning.search`.
        reasons: with a calibration, why ``best`` is the best, a sentence each.
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
        """Return everything as a JSON object, spans of the configured choice alone."""
        content = asdict(self)
        for choice in (*content["choices"], content["best"]):
            if choice is not None and choice["step_time"] is not None:
                del choice["step_time"]["spans"]
        return json.dumps(content, indent=2)

    def tables(self) -> tuple[Table, ...]:
        """Return the tables of bytes, the step, and choices, varied ones by time."""
        if all(choice.step_time is None for choice in self.choices):
            return super().tables()
        by_time = sorted(self.choices, key=lambda c: (c.is_varied, c.is_varied and c.sample_s))
        ordered = replace(self, choices=tuple(by_time))
        *others, choices = Plan.tables(ordered)
        times = {c.key: c.step_time for c in self.choices}
        cells = [_cells(times[choice.key]) for choice in ordered.shown_choices()]
        rows = tuple((*row, *cell) for row, cell in zip(choices.rows, cells, strict=True))
        steps = () if self.step_time is None else (_step_table(self.step_time),)
        return (*others, *steps, Table("Choices", (*choices.headings, "step", "bound"), rows))


def _cells(time: StepTime | None) -> tuple[str, str]:
    return ("-", "-") if time is None else (_seconds(time.total_s), time.bound)


def _step_table(time: StepTime) -> Table:
    rows = [
        (lane, _seconds(time.lanes[lane]), f"{time.lanes[lane] / time.total_s:.0%}")
        for lane in LANES
    ]
    rows.append(("step", _seconds(time.total_s), "100%"))
    return Table("Predicted step", ("lane", "busy", "of the step"), tuple(rows))


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s"
