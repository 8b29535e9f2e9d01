"""Figures of a run's usual step, from the records of all ranks.

The usual step is the mean of those between the quartiles of length, among the steps that were taken
after a warm-up: so the parts of it add up to the whole, and a checkpoint or an evaluation now and
then does not count.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from zero_core.records import StepRecord
from zero_engine.report.run import Rank, Run

WARMUP = 3
"""Steps of a start that do not count, if there are more than twice as many."""
INSIDE = ("forward", "backward", "step", "outside")
"""Places of the program in the order of a step."""
WAITS = {
    "all_gather": "gathers of parameters",
    "reduce_scatter": "reductions of gradients",
    "ranks": "other ranks",
    "update": "updates by the host",
}


@dataclass(frozen=True)
class RankStep:
    """The usual step of one rank. All times are seconds.

    Attributes:
        seconds: its length.
        places: own work by place.
        waits: by what it waits for.
        lanes: of what is at work beside it.
        held_bytes: after a step, the median.
        peak_bytes: the most.
        samples: of the rank in a step.
        micro_steps: of a step.
    """

    seconds: float
    places: Mapping[str, float]
    waits: Mapping[str, float]
    lanes: Mapping[str, float]
    held_bytes: int
    peak_bytes: int
    samples: int
    micro_steps: int

    @property
    def own_s(self) -> float:
        """Time in which it does not wait."""
        return sum(self.places.values())

    @property
    def compute_s(self) -> float:
        """Time in forward, backward and step, without waits."""
        return sum(self.places.get(name, 0.0) for name in ("forward", "backward", "step"))

    @property
    def outside_s(self) -> float:
        """Time in none of them."""
        return self.own_s - self.compute_s

    @property
    def wait_s(self) -> float:
        return sum(self.waits.values())


@dataclass(frozen=True)
class Measured:
    """Typical step across ranks.

    Attributes:
        ranks: in order.
        num_skipped: in the whole run.
        skipped_s: median length of the skipped steps, which may be longer; 0 if there are none.
        num_all: steps of the whole run.
    """

    run: Run
    ranks: Sequence[RankStep]
    num_skipped: int
    skipped_s: float
    num_all: int

    @property
    def seconds(self) -> float:
        """Length of a step: all ranks' is the same but for what differs from step to step."""
        return max(rank.seconds for rank in self.ranks)

    @property
    def has_times(self) -> bool:
        return any(rank.places for rank in self.ranks)

    def lane(self, name: str) -> float:
        """Return the longest time of a lane over ranks."""
        return max((rank.lanes.get(name, 0.0) for rank in self.ranks), default=0.0)

    def wait(self, name: str) -> float:
        """Return the mean wait over ranks."""
        return sum(rank.waits.get(name, 0.0) for rank in self.ranks) / len(self.ranks)


def kept_bytes(rank: Rank) -> Counter[str]:
    """Return bytes in a rank's long-lived memory by kind, the last that were recorded."""
    if not rank.details:
        return Counter()
    last = rank.details[-1]
    return Counter(last.kinds) + Counter(last.host_kinds)


def sent_bytes(rank: Rank) -> list[tuple[str, str, int]]:
    """Return what a rank sent in its last step: collective, link and bytes, none that are 0."""
    found: list[tuple[str, str, int]] = []
    for collective, content, _, within, between in next(
        (step.sent for step in reversed(rank.steps) if step.sent), ()
    ):
        name = f"{collective}: {content}"
        found += [(name, "within a node", within), (name, "between nodes", between)]
    if rank.steps and rank.run.environment.get("device") != "cpu":
        down, up = rank.steps[-1].copied
        found += [("copies to the host", "host link", down)]
        found += [("copies to the device", "host link", up)]
    return [row for row in found if row[2]]


def measure(run: Run) -> Measured:
    """Return the usual step of a run."""
    ranks, steps = [_usual(rank) for rank in run.ranks], run.ranks[0].steps
    skipped = [step.seconds for step in steps if not step.is_taken]
    return Measured(
        run, ranks, len(skipped), skipped_s=median(skipped or [0.0]), num_all=len(steps)
    )


def _usual(rank: Rank) -> RankStep:
    first = rank.run.first_step
    steps = [step for step in rank.steps if step.step > first]
    steps = [step for step in steps if step.is_taken] or steps
    later = [step for step in steps if step.step > first + WARMUP]
    steps = later if len(later) > WARMUP else steps
    middle, inner = _middle(steps), _middle([step for step in steps if step.places])
    held = sorted(step.memory_bytes for step in steps)
    lanes = _means([step.lanes for step in middle])
    copies = _means([step.lanes for step in inner]).get("copies")  # timed where places are
    return RankStep(
        seconds=_mean(step.seconds for step in middle),
        places=_means([step.places for step in inner]),
        waits=_means([step.waits for step in inner]),
        lanes=lanes if copies is None else {**lanes, "copies": copies},
        held_bytes=held[len(held) // 2] if held else 0,
        peak_bytes=max((step.peak_bytes for step in steps), default=0),
        samples=round(_mean(step.samples for step in middle)),
        micro_steps=round(_mean(step.micro_steps for step in middle)),
    )


def _middle(steps: Sequence[StepRecord]) -> Sequence[StepRecord]:
    ordered, quarter = sorted(steps, key=lambda step: step.seconds), len(steps) // 4
    return ordered[quarter : len(ordered) - quarter]


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return math.fsum(found) / len(found) if found else 0.0


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each key, the largest first. It is 0 in rows without the key."""
    names = {name for row in rows for name in row}
    found = {name: _mean(row.get(name, 0.0) for row in rows) for name in names}
    return dict(sorted(found.items(), key=lambda item: -item[1]))
