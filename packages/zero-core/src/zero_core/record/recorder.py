"""Recorder of an engine's steps, created by `zero_core.Engine.record`.

A recorder reads the engine's state at the end of each step and changes no value. On an accelerator,
a step is written at the end of the next step or before the next event, so that a step adds no
synchronization. Times per activity (forward, backward, ...) are measured in every step on a CPU,
and on an accelerator in the steps that are recorded in detail.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_core.checkpoint.storage import local_path
from zero_core.comm.clock import Mark, MemoryMeter, StepClock
from zero_core.comm.communicator import Communicator
from zero_core.comm.meter import Meter
from zero_core.comm.place import OUTSIDE, UPDATE
from zero_core.config import Config
from zero_core.core.extension import EndedStep, Extension, Extensions
from zero_core.errors import CheckpointError, ConfigError
from zero_core.optim.train_state import TrainState
from zero_core.parts import load_part
from zero_core.protocols import DeviceMemory, TimedTier
from zero_core.record.environment import describe_environment
from zero_core.records import DetailRecord, EventRecord, Record, RecordFile, RunRecord, StepRecord
from zero_core.sharded.memory import Memory
from zero_core.sharded.sharded_state import ShardedState

_log = logging.getLogger(__name__)

REPORTS = "zero_core.reports"  # group of the entry point that renders a folder's records
_FIRST_DETAILS = (1, 3)  # steps of a recording in detail, besides each ``detail_every``-th
_MAX_ERROR = 500  # maximum number of characters of a recorded error
_MAX_SPANS = 4000  # maximum number of spans and of memory values per step
_STATE_KINDS = {  # names in a memory plan, by the names of `DeviceMemory.device_tensors`
    "master_weights": "master weights",
    "optimizer_states": "optimizer states",
    "buffers": "widened gradients",
}
_PLACES = (  # (prefix of `Place.doing`, key of `StepRecord.places`)
    ("forward of", "forward"),
    ("backward", "backward"),
    ("step()", "step"),
    ("sum of the step", "step"),
    (OUTSIDE, "outside"),
)
_WAITS = {"gather": "all_gather", "reduce": "reduce_scatter", "ranks": "ranks"}


class Subject(NamedTuple):
    """Parts of an engine that a recorder reads."""

    config: Config
    state: ShardedState
    train: TrainState
    meter: Meter
    memory: Memory
    communicator: Communicator


@dataclass(slots=True)
class _Step:
    """Data of a step from its start until its record is written."""

    begun: float  # start, by `time.perf_counter`
    begun_at: float  # start, by `time.time`
    is_detailed: bool
    losses: list[Tensor] = field(default_factory=list)
    num_backwards: int = 0
    num_idle: int = 0
    # The fields below are set at the end of the step.
    record: dict[str, Any] = field(default_factory=dict)  # fields of `StepRecord`
    detail: dict[str, Any] = field(default_factory=dict)  # fields of `DetailRecord`, or empty
    clock: StepClock | None = None
    rates: Sequence[float | Tensor] = ()
    updates: Sequence[tuple[float, float]] = ()
    copies: Sequence[tuple[str, torch.Event, torch.Event]] = ()


class Recorder(Extension):
    """Writer of one rank's records, until its context, the engine or the program ends.

    An exception that ends the recording is recorded. A process that is killed or calls ``os._exit``
    records no end.
    """

    def __init__(
        self, subject: Subject, folder: Path, *, max_bytes: int, detail_every: int
    ) -> None:
        """Open the file and write the run record. See `zero_core.Engine.record`."""
        self.folder = folder  # folder of the files of all ranks
        self._subject = subject
        self._place = subject.communicator.place
        self._device = device = subject.state.device
        self._is_host = device.type == "cpu"
        self._detail_every = detail_every
        self._tier = tier if isinstance(tier := subject.state.tier, TimedTier) else None
        self._file = RecordFile(folder, subject.state.control.rank, max_bytes)
        try:
            self._file.write(self._run_record())
        except OSError:
            self._file.close()
            raise
        self._memory = MemoryMeter(device)
        # The arguments must not reference the engine: a finalizer would keep it alive.
        self._release = weakref.finalize(self, _abandon, os.getpid(), self._file, self._memory)
        self._launched: dict[str, float] = {}  # shared by the clocks of all steps
        self._input_shape: list[int] = []
        self._pending: _Step | None = None  # step that has ended and is not yet written
        self._work: Mapping[str, float] = {} if self._tier is None else self._tier.work_s()
        self._copied = (0, 0)
        self._num_steps = 0
        self._begin(time.perf_counter(), None)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.end(error)

    def called(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        found = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
        if found is not None:
            self._input_shape = list(found.shape)

    def scaled(self, loss: Tensor) -> None:
        """Count a backward. Copy its unscaled loss to the host without a synchronization."""
        self._step.num_backwards += 1
        if loss.numel() != 1 or self._is_closed:
            return
        value = loss.detach().reshape(())
        kept = torch.empty_like(value, device="cpu", pin_memory=not self._is_host)
        self._step.losses.append(kept.copy_(value, non_blocking=True))

    def idled(self) -> None:
        self._step.num_idle += 1

    def stepped(self, ended: EndedStep) -> None:
        if self._is_closed:
            return
        now = time.perf_counter()
        subject, tier, train, step = self._subject, self._tier, self._subject.train, self._step
        step.clock, self._place.clock = self._place.clock, None
        work = {} if tier is None else tier.work_s()
        copied = (0, 0) if tier is None else tier.copied_bytes()
        held = self._memory.held()
        if step.is_detailed:
            trail = [] if step.clock is None else step.clock.trail
            trail.append((now - step.begun, held, self._place.doing))
            step.detail = {
                "step": ended.number,
                "started_at": step.begun_at,
                "memory": trail[:_MAX_SPANS],
                "kinds": self._kinds(),
                "host_kinds": {} if tier is None else tier.host_memory_bytes(),
            }
            if tier is not None:
                step.updates, step.copies = tuple(tier.recent_updates()), tuple(tier.take_copies())
        # Count backwards, because a program may run several per micro-step.
        micro_steps = max(ended.micro_steps, step.num_backwards + step.num_idle)
        batch = subject.config.train_micro_batch_size_per_gpu
        step.record = {
            "step": ended.number,
            "at": time.time(),
            "seconds": now - step.begun,
            "is_taken": not ended.why_skipped,
            "why_skipped": ended.why_skipped,
            "grad_norm": train.grad_norm,
            "loss_scale": train.scaler.scale,
            "micro_steps": micro_steps,
            "samples": batch * (micro_steps - step.num_idle),
            "input_shape": self._input_shape,
            "lanes": {lane: s - self._work.get(lane, 0.0) for lane, s in work.items()},
            "sent": [
                [t.collective, t.content, t.num_calls, t.within_node_bytes, t.between_nodes_bytes]
                for t in subject.meter.report()
            ],
            "copied": [copied[0] - self._copied[0], copied[1] - self._copied[1]],
            "memory_bytes": held,
            "peak_bytes": self._memory.peak(held),
        }
        end = None if step.clock is None else step.clock.end()
        step.rates = [rate.clone() if isinstance(rate, Tensor) else rate for rate in ended.rates]
        self._work, self._copied = work, copied
        self.flush()
        self._pending = step
        if self._is_host:
            self.flush()
        self._num_steps += 1
        if not self._is_closed:
            self._begin(now, end if self._is_host else None)

    def _begin(self, now: float, end: Mark | None) -> None:
        """Begin a step at ``now``. ``end``: the previous step's last mark, on a CPU."""
        number = self._subject.train.global_steps + 1
        is_detailed = self._num_steps + 1 in _FIRST_DETAILS or number % self._detail_every == 0
        self._step = _Step(now, time.time() + now - time.perf_counter(), is_detailed)
        if self._tier is not None:
            self._tier.time_copies(is_on=is_detailed)
        if self._is_host or is_detailed:
            clock = StepClock(self._device, self._place.doing, self._launched, end)
            if is_detailed:
                clock.begin_trail(now, self._memory)
            self._place.clock = clock

    def flush(self) -> None:
        """Write the pending step to the file, if there is one."""
        step, self._pending = self._pending, None
        if step is None:
            return
        record, clock = step.record, step.clock
        values = [float(loss) for loss in step.losses]
        record["loss"] = sum(values) / len(values) if values else None
        record["lr"] = [float(rate) for rate in step.rates]
        if clock is None:
            self._put(StepRecord(**record))
            return
        spans = clock.spans()
        places: dict[str, float] = defaultdict(float)
        waits: dict[str, float] = defaultdict(float)
        for doing, waits_for, start, stop in spans:
            if doing == UPDATE:
                waits["update"] += stop - start
            elif waits_for:
                waits[_WAITS[_lane_of(waits_for)]] += stop - start
            else:
                keys = (key for begin, key in _PLACES if doing.startswith(begin))
                places[next(keys, doing)] += stop - start
        record["places"] = {name: round(seconds, 7) for name, seconds in places.items()}
        record["waits"] = {name: round(seconds, 7) for name, seconds in waits.items()}
        beside = [
            (_lane_of(what), what, clock.seconds(a), clock.seconds(b))
            for what, a, b in clock.under_way
        ]
        for what, begin, end in step.copies:
            end.synchronize()
            beside.append(("copies", what, clock.seconds(begin), clock.seconds(end)))
        for lane in ("gather", "reduce", "copies"):
            own = [(a, b) for of, _, a, b in beside if of == lane]
            if own:
                record["lanes"][lane] = _covered(own)
        if self._is_host:
            record["seconds"] = spans[-1][-1]
        self._put(StepRecord(**record))
        if not step.detail:
            return
        course = [
            ("compute", waits_for or doing, a, b, bool(waits_for) or doing == UPDATE)
            for doing, waits_for, a, b in spans
        ]
        course += [(*one, False) for one in beside]
        for begun, ended in step.updates if self._is_host else ():
            since = clock.seconds(begun)
            if since + ended - begun > 0.0:
                course.append(("host", "update", since, since + ended - begun, False))
        found = [
            (lane, name, round(a, 7), round(b, 7), is_wait)
            for lane, name, a, b, is_wait in course
            if b - a >= 1e-6
        ]
        self._put(DetailRecord(spans=found[:_MAX_SPANS], **step.detail))

    def _put(self, record: Record) -> None:
        """Write a record. On failure, warn and stop recording, while training continues."""
        if self._is_closed:
            return
        try:
            self._file.write(record)
        except (OSError, ValueError) as error:
            text = "%s cannot be written: %s. Steps are not recorded any more; training goes on"
            _log.warning(text, self._file.path, error)
            self._stop()

    def saved(self, call: str, seconds: float) -> None:
        self._note("saved", call, seconds)

    def loaded(self, folder: str, seconds: float) -> None:
        self._note("loaded", folder, seconds)

    def _note(self, what: str, text: str, seconds: float) -> None:
        if self._is_closed:
            return
        self.flush()
        step = self._subject.train.global_steps
        self._put(EventRecord(time.time(), step, what, text, seconds))

    def end(self, error: BaseException | None = None) -> None:
        """End the recording. ``error``: the exception that ends it, if any."""
        if self._is_closed:
            return
        end = _end(self._subject.train.global_steps, error)
        if end.what == "ended":
            self.flush()
        else:
            self._pending = None  # a failed device may never finish the step
        self._put(end)
        self._stop()

    def remove(self) -> None:
        """End the recording, with the exception that is being handled or was not caught, if any."""
        self.end(sys.exc_info()[1] or _uncaught())

    @property
    def _is_closed(self) -> bool:
        return not self._release.alive

    def _stop(self) -> None:
        self._place.clock = None
        if self._tier is not None:
            self._tier.time_copies(is_on=False)
        self._step.losses, self._pending = [], None
        if self._release.detach() is not None:
            self._file.close()
            self._memory.close()

    def _kinds(self) -> dict[str, int]:
        subject = self._subject
        found = {**subject.memory.report(), **subject.communicator.private_nbytes}
        tier = subject.state.tier
        if isinstance(tier, DeviceMemory):
            known = {_storage(t) for ts in subject.memory.device_tensors().values() for t in ts}
            for name, tensors in tier.device_tensors().items():
                own = {_storage(t) for t in tensors} - known
                known |= own
                kind = _STATE_KINDS.get(name)
                if kind is not None and own:
                    found[kind] = found.get(kind, 0) + sum(nbytes for _, nbytes in own)
        return found

    def _run_record(self) -> RunRecord:
        subject = self._subject
        state, config = subject.state, subject.config
        layout = state.layout
        numel = layout.local_numel(is_sharded=subject.memory.has_sharded_state)
        on_host = self._tier.host_numel if self._tier is not None else 0
        model: dict[str, Any] = {}  # the model's Hugging Face configuration
        with suppress(AttributeError, TypeError, ValueError):  # foreign: a Hugging Face attribute
            found = state.module.config.to_dict()  # type: ignore[operator,union-attr]
            model = dict(json.loads(json.dumps(found, default=str)))
        return RunRecord(
            rank=state.control.rank,
            world_size=state.control.world_size,
            ranks_per_node=subject.meter.links.ranks_per_node,
            started_at=time.time(),
            first_step=subject.train.global_steps,
            num_parameters=sum(p.numel for p in layout.params),
            num_trainable=sum(p.numel for p in layout.params if p.is_trainable),
            units=[unit.name for unit in layout.units],
            shares={"device": numel - on_host, "host": on_host},
            config=config.model_dump(mode="json"),
            environment=describe_environment(self._device),
            model=model,
        )


def _abandon(pid: int, file: RecordFile, memory: MemoryMeter) -> None:
    """Record the end of a program, or of a recorder that was garbage-collected.

    Does not write an accelerator's pending step, because the wait for a hung device would keep the
    program from exiting.
    """
    if os.getpid() == pid:  # a forked child writes nothing
        with suppress(OSError, ValueError):
            file.write(_end(file.last_step, _uncaught()))
    file.close()
    memory.close()


def _uncaught() -> BaseException | None:
    if hasattr(sys, "ps1"):  # foreign: an interactive interpreter continues after errors
        return None
    return getattr(sys, "last_value", None)  # foreign: an attribute of the interpreter


def _end(step: int, error: BaseException | None) -> EventRecord:
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return EventRecord(time.time(), step, "ended")
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return EventRecord(time.time(), step, "failed", text[:_MAX_ERROR])


def _storage(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _lane_of(what: str) -> str:
    if what.startswith(("all_gather", "gather")):
        return "gather"
    return "reduce" if "reduce_scatter" in what else "ranks"


def _covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the length of the union of ``intervals``, ignoring parts before 0."""
    total, reached = 0.0, 0.0
    for start, stop in sorted(intervals):
        start = max(start, reached)
        if stop > start:
            total += stop - start
            reached = stop
    return round(total, 7)


class StepRecords:
    """Implementation of `zero_core.Engine.record` and ``report``."""

    def __init__(self, subject: Subject, extensions: Extensions) -> None:
        self._subject = subject
        self._extensions = extensions
        self._recorder: Recorder | None = None

    def start(self, folder: str | Path, *, max_bytes: int, detail_every: int) -> Recorder:
        """Start a recording in ``folder``. Ends an earlier recording."""
        try:
            place = local_path(folder, "a record of steps")
        except CheckpointError as error:
            raise ConfigError(f"record: {error}") from None
        if self._recorder is not None:
            self._recorder.remove()
            self._extensions.bind([e for e in self._extensions.all if e is not self._recorder])
        try:
            self._recorder = Recorder(
                self._subject, place, max_bytes=max_bytes, detail_every=detail_every
            )
        except OSError as error:
            raise ConfigError(f"record: {folder} cannot be written: {error.strerror}") from error
        self._extensions.bind([self._recorder, *self._extensions.all])
        return self._recorder

    def report(self, path: Path) -> Path:
        """Write a report of all steps recorded so far to ``path``."""
        if self._recorder is None:
            raise ConfigError(
                "report: no step has been recorded: call engine.record(folder) before the first "
                "one, or set step_records.folder in the configuration"
            )
        self._recorder.flush()
        write = load_part(REPORTS, "html", asked_by="engine.report()", distribution="zero-parts")
        return Path(write(self._recorder.folder, path))
