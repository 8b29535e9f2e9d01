"""Recorded run as a report reads it: the records of all ranks, and figures of its usual step.

The usual step is the mean of the steps between the quartiles of length, without skipped steps and
without a warm-up, so that occasional checkpoints or evaluations do not count.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from zero_core.config import Config, load_effective
from zero_core.errors import ConfigError
from zero_core.records import (
    FILE,
    DetailRecord,
    EventRecord,
    Record,
    RunRecord,
    StepRecord,
    read_records,
)
from zero_engine.train.settings import RECORDS, RunFolder

WARMUP = 3
INSIDE = ("forward", "backward", "step", "outside")
WAITS = {
    "all_gather": "gathers of parameters",
    "reduce_scatter": "reductions of gradients",
    "ranks": "other ranks",
    "update": "updates by the host",
}


@dataclass(frozen=True)
class Rank:
    """One rank's records. If a step was repeated after a restart, its last record counts.

    ``run`` is the last of ``starts`` that took a step, if any did. ``config`` is that of ``run``.
    """

    starts: Sequence[RunRecord]
    run: RunRecord
    config: Config
    steps: Sequence[StepRecord]
    details: Sequence[DetailRecord]
    events: Sequence[EventRecord]

    @property
    def last_step(self) -> int:
        return self.steps[-1].step if self.steps else self.run.first_step

    @property
    def end(self) -> EventRecord | None:
        since = self.run.started_at
        ends = [e for e in self.events if e.what in ("ended", "failed") and e.at >= since]
        return ends[-1] if ends else None


@dataclass(frozen=True)
class Run:
    """Records of all ranks of a run: ``ranks`` of the last start, and held-out losses by step.

    ``given`` is the configuration as the user wrote it, if the run has kept it.
    """

    folder: Path
    ranks: Sequence[Rank]
    held_out: Sequence[tuple[int, float]]
    given: dict[str, Any] | None

    @property
    def run(self) -> RunRecord:
        return self.ranks[0].run

    @property
    def settings(self) -> dict[str, Any]:
        """Configuration in effect without defaults, in the form that a plan accepts."""
        return self.ranks[0].config.model_dump(
            mode="json", exclude_defaults=True, exclude={"step_records"}
        )

    @property
    def failures(self) -> list[str]:
        """Sentences about failed ranks, by time, and ranks without an end if others have one."""
        ends = [(rank, rank.end) for rank in self.ranks]
        failed = [(e.at, rank, e) for rank, e in ends if e is not None and e.what == "failed"]
        found = [
            f"rank {rank.run.rank} failed after step {event.step}: {event.text.rstrip('.')}"
            for _, rank, event in sorted(failed, key=lambda each: each[0])
        ]
        if any(end is not None for _, end in ends):
            found += [
                f"rank {rank.run.rank} left no end after step {rank.last_step}: it was killed"
                for rank, end in ends
                if end is None
            ]
        return found

    @property
    def absent(self) -> list[int]:
        known = {rank.run.rank for rank in self.ranks}
        return [rank for rank in range(self.run.world_size) if rank not in known]


def read_run(folder: Path) -> Run:
    places = [place for place in (folder / RECORDS, folder) if place.is_dir()]
    files = [file for place in places for file in sorted(place.glob(FILE.format(rank="*")))]
    ranks = {rank.run.rank: rank for file in files if (rank := _read_rank(file)) is not None}
    if not ranks:
        what = "there is no such folder" if not places else "the folder has no records"
        raise ConfigError(
            f"{folder}: {what}. zero-engine train leaves them, as do zero-engine run --record "
            "FOLDER, engine.record(folder), and step_records.folder in a configuration"
        )
    world_size = max(ranks.values(), key=lambda rank: rank.run.started_at).run.world_size
    present = [ranks[number] for number in sorted(ranks) if number < world_size]
    return Run(folder, present, _held_out(folder), _given(folder))


def _read_rank(file: Path) -> Rank | None:
    try:
        records = read_records(file)
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from None

    def of(kind: type[Any]) -> list[Any]:
        return [record for record in records if isinstance(record, kind)]

    records = _resumed(records)
    starts: list[RunRecord] = of(RunRecord)
    if not starts:
        return None
    by_number: dict[int, StepRecord] = {}
    for record in records:
        if isinstance(record, RunRecord):  # a restart repeats the steps after its first_step
            by_number = {n: step for n, step in by_number.items() if n <= record.first_step}
        elif isinstance(record, StepRecord):
            by_number[record.step] = record
    steps = [by_number[number] for number in sorted(by_number)]
    last = steps[-1].step if steps else 0
    took = (start for start in reversed(starts) if start.first_step < last)
    run = next(took, starts[-1])
    try:
        config = load_effective(run.config)
    except ConfigError as error:
        raise ConfigError(f"{file}: run.config is no configuration: {error}") from None
    details: dict[int, DetailRecord] = {detail.step: detail for detail in of(DetailRecord)}
    in_order = [details[number] for number in sorted(details)]
    return Rank(starts, run, config, steps, in_order, of(EventRecord))


def _resumed(records: Sequence[Record]) -> list[Record]:
    """Set ``first_step`` of each start's record: recording begins before a checkpoint is loaded."""
    found = list(records)
    start: RunRecord | None = None
    place = 0
    for number, record in enumerate(records):
        if isinstance(record, RunRecord):
            start, place = record, number
        elif isinstance(record, StepRecord):
            start = None
        elif isinstance(record, EventRecord) and record.what == "loaded" and start is not None:
            found[place] = replace(start, first_step=record.step)
    return found


def _held_out(folder: Path) -> list[tuple[int, float]]:
    from zero_engine.train.metrics import read_metrics

    path = RunFolder(folder).metrics
    if not path.is_file():
        return []
    entries = [entry for entry in read_metrics(path) if "held_out_loss" in entry]
    return [(int(entry["step"]), float(entry["held_out_loss"])) for entry in entries]


def _given(folder: Path) -> dict[str, Any] | None:
    path = RunFolder(folder).resolved_config
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    config = found.get("config") if isinstance(found, dict) else None
    return config if isinstance(config, dict) else None


@dataclass(frozen=True)
class RankStep:
    """Usual step of one rank, in seconds: own work by place, waits by reason, and concurrent lanes.

    ``held_bytes`` is the median memory after a step. ``samples`` counts this rank's samples.
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
        return sum(self.places.values())

    @property
    def compute_s(self) -> float:
        return sum(self.places.get(name, 0.0) for name in ("forward", "backward", "step"))

    @property
    def outside_s(self) -> float:
        return self.own_s - self.compute_s


@dataclass(frozen=True)
class Measured:
    """Usual step across ranks, and numbers of steps in the whole run.

    ``skipped_s`` is the median length of the skipped steps, 0 without any.
    """

    run: Run
    ranks: Sequence[RankStep]
    num_skipped: int
    skipped_s: float
    num_all: int

    @property
    def seconds(self) -> float:
        return max(rank.seconds for rank in self.ranks)

    @property
    def has_times(self) -> bool:
        return any(rank.places for rank in self.ranks)

    def lane(self, name: str) -> float:
        return max((rank.lanes.get(name, 0.0) for rank in self.ranks), default=0.0)

    def wait(self, name: str) -> float:
        return sum(rank.waits.get(name, 0.0) for rank in self.ranks) / len(self.ranks)


def kept_bytes(rank: Rank) -> Counter[str]:
    if not rank.details:
        return Counter()
    last = rank.details[-1]
    return Counter(last.kinds) + Counter(last.host_kinds)


def sent_bytes(rank: Rank) -> list[tuple[str, str, int]]:
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
    # Copies are timed in the same steps as places.
    copies = _means([step.lanes for step in inner]).get("copies")
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
    names = {name for row in rows for name in row}
    found = {name: _mean(row.get(name, 0.0) for row in rows) for name in names}
    return dict(sorted(found.items(), key=lambda item: -item[1]))
