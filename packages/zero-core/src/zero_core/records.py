"""Records of a run, one JSON line each, and the file that holds the records of one rank.

A line is a JSON object with the kind of record, the version of this format and the fields of one of
the classes below. Bytes, seconds and elements are plain numbers. Numbers that are not finite are
strings ("nan", "inf"), because JSON has no such numbers. Readers ignore unknown fields and kinds.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, TypeAdapter, ValidationError

VERSION = 1  # version of the format. `read_records` also accepts earlier ones
FILE = "steps-rank{rank}.jsonl"  # one rank's file in the folder of a run
MAX_BYTES = 2**30  # largest file that is read

_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Number = Annotated[int, Field(ge=1, lt=2**63)]
_Seconds = Annotated[float, Field(gt=-1e12, lt=1e12)]
_Time = Annotated[float, Field(ge=0.0, lt=1e11)]  # seconds since the epoch


@dataclass(frozen=True)
class RunRecord:
    """Start of a recording: rank, model, configuration and machine of one process."""

    kind: ClassVar[str] = "run"

    rank: _Count  # rank in the process group
    world_size: _Number
    ranks_per_node: _Number
    started_at: _Time
    first_step: _Count  # number of steps before the start, skipped ones included
    num_parameters: _Count  # elements of all parameters
    num_trainable: _Count  # elements of trainable parameters
    units: Sequence[str]  # names of the units, by index
    shares: Mapping[str, _Count]  # this rank's elements by updater ("device", "host"), padded
    config: Mapping[str, Any]  # the resolved configuration
    environment: Mapping[str, Any]  # versions, device, cores, threads and memory
    # configuration of a Hugging Face model, or empty
    model: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step on one rank, from the end of the previous step to its own end."""

    kind: ClassVar[str] = "step"

    step: _Count  # number of the step, from 1
    at: _Time  # when it ended, in seconds since the epoch
    seconds: _Seconds  # duration of the step
    is_taken: bool  # whether parameters were updated
    why_skipped: str  # why parameters were not updated, or empty
    loss: float | None  # mean of this rank's unscaled losses. None if the engine saw no loss
    grad_norm: float | None  # 2-norm of the gradient over all ranks, unscaled, before clipping
    loss_scale: float  # loss scale after the step
    lr: Sequence[float]  # learning rate of each parameter group in this step
    micro_steps: _Count  # micro-steps of this step, or its backwards if there are more
    samples: _Count  # samples of this rank, as configured. An idle micro-step has none
    input_shape: Sequence[_Count] = ()  # shape of the first tensor in the engine's last input
    # seconds by activity, without waits: "forward", "backward", "step", "outside" and others. Empty
    # if no times were measured
    places: Mapping[str, _Seconds] = field(default_factory=dict)
    # seconds of waits by cause: "all_gather", "reduce_scatter", "ranks" (small exchanges), "update"
    # (of parameters, by the host)
    waits: Mapping[str, _Seconds] = field(default_factory=dict)
    # seconds of concurrent work: "gather" and "reduce" (collectives, on a CPU), "host" (updates),
    # "file" (reads and writes), "file wait" (updates that wait for a file), "copies" (between an
    # accelerator and its host, only in steps with a `DetailRecord`)
    lanes: Mapping[str, _Seconds] = field(default_factory=dict)
    # rows of `zero_core.Engine.comm_report`: collective, content, calls, bytes within the node,
    # bytes between nodes
    sent: Sequence[tuple[str, str, _Count, _Count, _Count]] = ()
    copied: tuple[_Count, _Count] = (0, 0)  # bytes to the host and from the host
    memory_bytes: _Count = 0  # bytes that this rank holds after the step
    peak_bytes: _Count = 0  # largest memory that this rank has held so far, also within steps


@dataclass(frozen=True)
class DetailRecord:
    """Timeline of one step on one rank. Times are seconds since the step began."""

    kind: ClassVar[str] = "detail"

    step: _Count  # number of the step
    started_at: _Time  # when it began, in seconds since the epoch
    # spans: lane, name, start, stop, and whether the rank waited
    spans: Sequence[tuple[str, str, _Seconds, _Seconds, bool]]
    # memory: time, bytes and activity, at the start, at each change of activity and at the end
    memory: Sequence[tuple[_Seconds, _Count, str]]
    kinds: Mapping[str, _Count] = field(default_factory=dict)  # long-lived bytes, by kind
    # bytes of host memory that the state tier holds, by kind
    host_kinds: Mapping[str, _Count] = field(default_factory=dict)


@dataclass(frozen=True)
class EventRecord:
    """An event other than a step."""

    kind: ClassVar[str] = "event"

    at: _Time  # seconds since the epoch
    step: _Count  # number of steps before the event, skipped ones included
    what: str  # "saved", "loaded", "ended", or "failed" for an end by an uncaught error
    text: str = ""  # the call or the folder, or the first line of the error
    seconds: _Seconds = 0.0  # time that the program waited for the event


Record = RunRecord | StepRecord | DetailRecord | EventRecord
# Most records that a thinned file keeps, by kind. Steps that were taken have no such limit.
_MOST = {"step": 1000, "detail": 4, "run": 1000, "event": 1000}
_FORMS: Mapping[str, TypeAdapter[Any]] = {
    cls.kind: TypeAdapter(cls) for cls in (RunRecord, StepRecord, DetailRecord, EventRecord)
}


def to_line(record: Record) -> str:
    values = {"kind": record.kind, "version": VERSION, **_plain(vars(record))}
    return json.dumps(values, default=str, allow_nan=False) + "\n"


def read_records(path: Path) -> list[Record]:
    """Return the records of a file, in order.

    Skips lines that are not JSON (a killed process may leave one) and records of unknown kinds.

    Raises:
        OSError: the file cannot be read.
        ValueError: the path is no regular file, the file has more than `MAX_BYTES`, a record has a
            later version or none, or a field of a record is wrong.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file: records are lines of JSON in one")
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{path} has {size} bytes; records are read up to {MAX_BYTES}")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            continue
        kind = values.get("kind") if isinstance(values, dict) else None
        form = _FORMS.get(kind) if isinstance(kind, str) else None
        if form is None:
            continue
        version = values.get("version")
        if not isinstance(version, int) or version > VERSION:
            raise ValueError(
                f"{path}: records of version {version!r:.100}; this zero-core reads up to "
                f"version {VERSION}: update it"
            )
        try:
            records.append(form.validate_python(values))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise ValueError(
                f"{path}, line {number}: {kind}.{place} is {first['input']!r:.100}: "
                f"{first['msg']}. The file was damaged or changed: remove the line"
            ) from None
    return records


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


class RecordFile:
    """Writer of one rank's records to a file of bounded size.

    A file above ``max_bytes`` is thinned. Of taken steps, those with a number divisible by a stride
    (1, 2, 4, ...) stay. The stride is the smallest one at which they fit in three eighths of
    ``max_bytes``, and applies to later steps, too. Of all other records the newest stay, up to
    `_MOST` of a kind and another three eighths. The last `RunRecord` always stays.
    """

    def __init__(self, folder: Path, rank: int, max_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE.format(rank=rank)
        self._max_bytes = self._limit = max_bytes
        self._stride = 1
        self.last_step = 0  # number of the last step passed to `write`
        self._file = self.path.open("a", encoding="utf-8")
        if self._file.tell():
            self._file.write("\n")  # the previous line may be cut short

    def write(self, record: Record) -> None:
        """Write and flush a record. Skip a taken step if the stride does not divide its number."""
        if isinstance(record, StepRecord):
            self.last_step = record.step
        if isinstance(record, StepRecord) and record.is_taken and record.step % self._stride:
            return
        self._file.write(to_line(record))
        self._file.flush()
        if self._file.tell() > self._limit:
            self._thin()

    def _thin(self) -> None:
        lines = [(record, to_line(record)) for record in read_records(self.path)]
        share = self._max_bytes * 3 // 8
        # Of records other than taken steps, keep the newest, and the last `RunRecord` always.
        kept, taken = set[int](), []
        room, left, has_start = share, dict(_MOST), False
        for i, (record, line) in reversed(list(enumerate(lines))):
            if isinstance(record, StepRecord) and record.is_taken:
                taken.append((record.step, i))
                continue
            is_last_start = isinstance(record, RunRecord) and not has_start
            has_start |= is_last_start
            if is_last_start or (len(line) <= room and left[record.kind]):
                kept.add(i)
                left[record.kind] -= 1
                room -= len(line)
        while True:
            taken = [(step, i) for step, i in taken if step % self._stride == 0]
            if len(taken) <= 2 or sum(len(lines[i][1]) for _, i in taken) <= share:
                break
            self._stride *= 2
        kept.update(i for _, i in taken)
        text = "".join(lines[i][1] for i in sorted(kept))
        aside = self.path.with_suffix(".partial")
        try:
            aside.write_text(text, encoding="utf-8")
            self._file.close()
            os.replace(aside, self.path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
        self._file = self.path.open("a", encoding="utf-8")
        self._limit = max(self._max_bytes, self._file.tell() + self._max_bytes // 4)

    def close(self) -> None:
        """Close the file. A line that could not be written before is lost."""
        with suppress(OSError):
            self._file.close()
