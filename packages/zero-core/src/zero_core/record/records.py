"""Lines that a recorded run leaves behind, and the file of one rank.

A line is a JSON object with the kind of record, the version of this format and the fields of one of
the classes here. Bytes, seconds and elements are plain numbers; a number that is not finite is a
string ("nan", "inf"), which JSON has no number for. What a reader does not know it ignores.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

VERSION = 1
"""Of the format. A reader takes files of its own version and of those before."""
FILE = "steps-rank{rank}.jsonl"
"""Name of a rank's file in the folder of a run."""


@dataclass(frozen=True)
class RunRecord:
    """One start of a program: its ranks, configuration and machine. The first line of each start.

    Attributes:
        rank: of the process group.
        world_size: number of ranks.
        ranks_per_node: ranks that share a host.
        started_at: seconds since the epoch.
        first_step: steps that were taken before.
        num_parameters: elements of all parameters.
        num_trainable: those that are trained.
        units: names of the units, in forward order.
        shares: elements that this rank updates, by place: "device", "host".
        config: the resolved configuration.
        environment: versions, device, cores, threads and memory.
        model: its Hugging Face configuration, or empty.
        matrix: shape of the largest matrix among the blocks' parameters, or empty.
    """

    kind: ClassVar[str] = "run"

    rank: int
    world_size: int
    ranks_per_node: int
    started_at: float
    first_step: int
    num_parameters: int
    num_trainable: int
    units: Sequence[str]
    shares: Mapping[str, int]
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    model: Mapping[str, Any] = field(default_factory=dict)
    matrix: Sequence[int] = ()


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step on one rank, from the end of the step before it to its own end.

    Attributes:
        step: its number, from 1.
        at: when it ended, in seconds since the epoch.
        seconds: its length.
        is_taken: whether parameters were updated.
        why_skipped: parameters whose gradient is not finite, and the ranks whose batches did it.
        loss: mean over this rank's micro-steps, unscaled; None if the engine saw no loss.
        grad_norm: 2-norm of the gradient over all ranks, unscaled, before clipping.
        loss_scale: after the step.
        lr: learning rate of each parameter group, as the step was taken with.
        micro_steps: backwards.
        samples: of this rank.
        input_shape: of the first tensor that the engine was called with, or empty.
        places: seconds by place of the program, waits apart: "forward", "backward", "step",
            "outside", and others by their names. Empty where no times were taken.
        waits: seconds in which it waited, by what for: "all_gather", "reduce_scatter", "ranks"
            (small exchanges), "update" (of parameters, by the host).
        lanes: seconds in which something else was at work: "gather" and "reduce" (collectives under
            way), "host" (updates), "file" (reads and writes), "file wait" (updates that wait).
        sent: rows of `zero_core.Engine.comm_report`: collective, content, calls, bytes within the
            node, bytes between nodes.
        copied: bytes to the host and from the host.
        memory_bytes: bytes that this rank holds after the step: on its device, or resident.
        peak_bytes: the most so far.
        outside: seconds by line of the program outside of the engine, by samples.
    """

    kind: ClassVar[str] = "step"

    step: int
    at: float
    seconds: float
    is_taken: bool
    why_skipped: str
    loss: float | None
    grad_norm: float | None
    loss_scale: float
    lr: Sequence[float]
    micro_steps: int
    samples: int
    input_shape: Sequence[int] = ()
    places: Mapping[str, float] = field(default_factory=dict)
    waits: Mapping[str, float] = field(default_factory=dict)
    lanes: Mapping[str, float] = field(default_factory=dict)
    sent: Sequence[Sequence[Any]] = ()
    copied: Sequence[int] = (0, 0)
    memory_bytes: int = 0
    peak_bytes: int = 0
    outside: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class DetailRecord:
    """The course of one step on one rank. Times are seconds since the step began.

    Attributes:
        step: its number.
        started_at: when it began, in seconds since the epoch.
        spans: lane, name, start, stop, and whether the rank waited.
        memory: time, bytes and place at each change of the place.
        kinds: bytes in the engine's long-lived memory by kind, after the step.
    """

    kind: ClassVar[str] = "detail"

    step: int
    started_at: float
    spans: Sequence[tuple[str, str, float, float, bool]]
    memory: Sequence[tuple[float, int, str]]
    kinds: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class EventRecord:
    """Something that happened besides steps.

    Attributes:
        at: seconds since the epoch.
        step: steps that were taken before.
        what: "saved", "loaded", "failed" or "ended".
        text: the folder, or the error.
        seconds: that the program waited for it.
    """

    kind: ClassVar[str] = "event"

    at: float
    step: int
    what: str
    text: str = ""
    seconds: float = 0.0


Record = RunRecord | StepRecord | DetailRecord | EventRecord
KINDS: Mapping[str, type[Record]] = {
    cls.kind: cls for cls in (RunRecord, StepRecord, DetailRecord, EventRecord)
}


def to_line(record: Record) -> str:
    """Return the record as a line of JSON, with its end."""
    values = {name: _plain(value) for name, value in vars(record).items()}
    text = json.dumps({"kind": record.kind, "version": VERSION, **values}, default=str)
    return text + "\n"


def read_records(path: Path) -> list[Record]:
    """Return the records of a file, in order.

    A line that was cut short, as by a killed process, and lines of unknown kinds are left out.

    Raises:
        ValueError: the file was written by a later version.
    """
    return list(_parse(path.read_text(encoding="utf-8").splitlines(), path))


def _parse(lines: Iterable[str], path: Path) -> Iterable[Record]:
    for line in lines:
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if not isinstance(values, dict) or values.get("kind") not in KINDS:
            continue
        if not isinstance(values.get("version"), int) or values["version"] > VERSION:
            raise ValueError(
                f"{path}: records of version {values.get('version')!r}; this zero-core reads up to "
                f"version {VERSION}: update it"
            )
        cls = KINDS[values["kind"]]
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        for name in ("loss", "grad_norm"):
            if isinstance(known.get(name), str):
                known[name] = float(known[name])
        try:
            yield cls(**known)
        except TypeError:  # a field is missing: not one of ours
            continue


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


class RecordFile:
    """Writer of one rank's records. Its size is bounded.

    Where the file has more than ``max_bytes``, every other step is removed, and from then on only
    such steps are written: a long run keeps records of all of its course, further apart.
    """

    def __init__(self, folder: Path, rank: int, max_bytes: int) -> None:
        """Open the file in ``folder``, after the records of earlier starts.

        Raises:
            OSError: it cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE.format(rank=rank)
        self._max_bytes = max_bytes
        self._stride = 1
        self._file = self.path.open("a", encoding="utf-8")
        if self._file.tell():
            self._file.write("\n")  # the line before may have been cut short
        self._size = self._file.tell()

    def write(self, record: Record) -> None:
        """Write a record, and have it in the file when the call returns."""
        if isinstance(record, StepRecord) and record.is_taken and record.step % self._stride:
            return
        line = to_line(record)
        self._file.write(line)
        self._file.flush()
        self._size += len(line)
        if self._size > self._max_bytes:
            self._thin()

    def _thin(self) -> None:
        self._stride *= 2
        records = read_records(self.path)
        steps = [r for r in records if isinstance(r, StepRecord)]
        skipped = [r.step for r in steps if not r.is_taken][-_MAX_SKIPPED:]
        details = [r.step for r in records if isinstance(r, DetailRecord)][-_MAX_DETAILS:]
        starts = [r for r in records if isinstance(r, RunRecord | EventRecord)][-_MAX_EVENTS:]
        kept: list[Record] = []
        for record in records:
            if isinstance(record, StepRecord):
                is_kept = record.step in skipped or record.step % self._stride == 0
            elif isinstance(record, DetailRecord):
                is_kept = record.step in details
            else:
                is_kept = record in starts
            if is_kept:
                kept.append(record)
        aside = self.path.with_suffix(".partial")
        aside.write_text("".join(map(to_line, kept)), encoding="utf-8")
        self._file.close()
        os.replace(aside, self.path)
        self._file = self.path.open("a", encoding="utf-8")
        self._size = self._file.tell()

    def close(self) -> None:
        self._file.close()


_MAX_SKIPPED, _MAX_DETAILS, _MAX_EVENTS = 1000, 4, 1000
"""Records of these kinds that stay where a file is thinned."""
