"""Monitoring of a run: scalars, times, memory, floating-point operations, bytes sent.

An engine calls its observers at the start and end of forward, backward and step, in the order of
its list. Observers do not change the results of training.
`zero_engine.deepspeed.engine.engine` makes the observers that a configuration requests.

Scalars go to TensorBoard, CSV files, Weights & Biases or Comet. Names, files and folders are
DeepSpeed's, so that programs that read DeepSpeed's logs can read these. A scalar is a name
("Train/Samples/lr"), a value, and the number of samples so far.

DeepSpeed's keys of the other observers are ``wall_clock_breakdown``, ``memory_breakdown``,
``flops_profiler`` and ``comms_logger``. On an accelerator, `WallClock` records events on the
current stream, and waits for them at the end of each step.
"""

from __future__ import annotations

import csv
import importlib
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt
from torch.utils.flop_counter import FlopCounterMode

from zero_core import ShardedModel
from zero_core.errors import ConfigError
from zero_engine.machine import used_bytes

COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
"""Names in ``comm_report()``. DeepSpeed's are longer: all_gather_into_tensor."""
_GB = 1e9
_HOST = torch.device("cpu")
_ALL = "Global"
_logs: weakref.WeakSet[CommunicationLog] = weakref.WeakSet()
_NAMES: Mapping[str, str] = {"forward": "fwd", "backward": "bwd", "step": "step"}
"""DeepSpeed's short names of a step's parts, by the monitors' names."""


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TensorBoardSettings(_Block):
    """``tensorboard``: event files in ``output_path/job_name``."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


class CsvSettings(TensorBoardSettings):
    """``csv_monitor``: one file per name in ``output_path/job_name``."""


class WandbSettings(_Block):
    """``wandb``: a run of Weights & Biases."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


class CometSettings(_Block):
    """``comet``: an experiment of Comet."""

    enabled: bool = False
    samples_log_interval: PositiveInt = 100
    """Least number of samples between two values of a name."""
    project: str | None = None
    workspace: str | None = None
    api_key: str | None = None
    experiment_name: str | None = None
    experiment_key: str | None = None
    online: bool | None = None
    mode: Literal["get", "create", "get_or_create"] | None = None


class MonitorSettings(_Block):
    """Blocks of the sinks of scalars. Several sinks can be enabled."""

    tensorboard: TensorBoardSettings = TensorBoardSettings()
    csv_monitor: CsvSettings = CsvSettings()
    wandb: WandbSettings = WandbSettings()
    comet: CometSettings = CometSettings()

    @property
    def enabled(self) -> bool:
        return any(block.enabled for _, block in self)


class FlopsProfilerSettings(_Block):
    """``flops_profiler``: floating-point operations of one step, counted by torch."""

    enabled: bool = False
    profile_step: Annotated[int, Field(ge=0)] = 1
    """Step to count. The first step is 0."""
    recompute_fwd_factor: float = 0.0
    """No effect: backward is counted, not estimated."""
    module_depth: Annotated[int, Field(ge=-1)] = -1
    """Depth of the deepest modules in the table. -1: all depths."""
    top_modules: PositiveInt = 1
    """Number of modules that are named per depth, by most operations."""
    detailed: bool = True
    output_file: str | None = None


class CommsLoggerSettings(_Block):
    """``comms_logger``: bytes that the engine's collectives send."""

    enabled: bool = False
    prof_all: bool = True
    """True logs all collectives, False only those in ``prof_ops``."""
    prof_ops: tuple[str, ...] = ()
    """Names that begin with one of `COLLECTIVES`."""
    verbose: bool = False
    """Print a line per collective after each step."""
    debug: bool = False
    """Add the content that a collective carries to its name."""


class ThroughputSettings(_Block):
    """``timers.throughput``: samples per second, every ``steps_per_print`` steps."""

    enabled: bool = True
    synchronized: bool = True
    """No effect: the device is synchronized when a line is printed."""


Event = tuple[str, Any, int]
"""Name, value, samples so far."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Facts of an optimizer step that has just ended, even if it was skipped."""

    global_steps: int
    global_samples: int
    """Samples so far, over all ranks."""
    lr: Sequence[float]
    """Learning rate of each parameter group, after the scheduler's step."""
    loss_scale: float | None
    """Loss scale after the step, None without fp16."""


class StepObserver:
    """Observer of the steps of this rank's engine.

    `end_forward`, `end_backward` and `end_step` are called even if their part raised an error.
    """

    def begin_forward(self) -> None:
        """Observe the start of a forward in training mode."""

    def end_forward(self) -> None:
        """Observe the end of a forward."""

    def begin_backward(self) -> None:
        """Observe the start of a micro-step's backward."""

    def end_backward(self) -> None:
        """Observe the end of a micro-step's backward."""

    def begin_plain_backward(self) -> None:
        """Observe the start of a script's ``loss.backward()``, at an output's first gradient."""
        self.begin_backward()

    def end_plain_backward(self) -> None:
        """Observe the end of ``loss.backward()``, just before it returns, unless it fails."""
        self.end_backward()

    def begin_step(self) -> None:
        """Observe the start of a micro-step's ``step()``, whether it updates or not."""

    def end_step(self) -> None:
        """Observe the end of a micro-step's ``step()``."""

    def step_done(self, facts: StepFacts) -> None:
        """Observe the end of a step, after ``end_step`` of its last micro-step."""


class Monitor:
    """Writer of (name, value, samples) to every sink, on rank 0. ``engine.monitor`` is one.

    ``enabled`` is true on every rank if the configuration asks for a sink.
    """

    def __init__(self, settings: MonitorSettings, *, rank: int) -> None:
        self.enabled = settings.enabled
        kinds: Mapping[str, Callable[[Any], _TensorBoard | _Wandb | _Csv | _Comet]] = {
            "tensorboard": _TensorBoard,
            "wandb": _Wandb,
            "csv_monitor": _Csv,
            "comet": _Comet,
        }
        asked = {name: getattr(settings, name) for name in kinds if rank == 0}
        self._sinks = [kinds[name](block) for name, block in asked.items() if block.enabled]

    def write_events(self, event_list: Sequence[Event]) -> None:
        for sink in self._sinks:
            sink.write(event_list)


class Scalars(StepObserver):
    """Writer of ``Train/Samples/lr`` and, with fp16, ``Train/Samples/loss_scale``."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def step_done(self, facts: StepFacts) -> None:
        events: list[Event] = [("Train/Samples/lr", facts.lr[0], facts.global_samples)]
        if facts.loss_scale is not None:
            events.append(("Train/Samples/loss_scale", facts.loss_scale, facts.global_samples))
        self._monitor.write_events(events)


def _library(name: str, block: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{block}.enabled = true needs a package that cannot be imported ({error}): "
            f'pip install "{package}", or set {block}.enabled to false'
        ) from None


class _TensorBoard:
    def __init__(self, settings: TensorBoardSettings) -> None:
        board = _library("torch.utils.tensorboard", "tensorboard", "tensorboard")
        folder = Path(settings.output_path) / settings.job_name
        self._writer = board.SummaryWriter(log_dir=str(folder))

    def write(self, events: Sequence[Event]) -> None:
        for event in events:
            self._writer.add_scalar(*event)
        self._writer.flush()


class _Csv:
    def __init__(self, settings: CsvSettings) -> None:
        self._folder = Path(settings.output_path) / settings.job_name
        self._folder.mkdir(parents=True, exist_ok=True)
        self._begun: set[Path] = set()

    def write(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            path = self._folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            with path.open("a", newline="") as file:
                rows = csv.writer(file)
                if path not in self._begun:
                    self._begun.add(path)
                    rows.writerow(["step", name.rpartition("/")[2]])
                rows.writerow([samples, value])


class _Wandb:
    def __init__(self, settings: WandbSettings) -> None:
        self._wandb = _library("wandb", "wandb", "wandb")
        self._wandb.init(project=settings.project, group=settings.group, entity=settings.team)

    def write(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            self._wandb.log({name: value}, step=samples)


class _Comet:
    """Experiment of Comet. Logs a name at most once per ``samples_log_interval`` samples."""

    def __init__(self, settings: CometSettings) -> None:
        comet = _library("comet_ml", "comet", "comet_ml>=3.41.0")
        self._interval = settings.samples_log_interval
        self._last: dict[str, int] = {}
        self._experiment = comet.start(
            api_key=settings.api_key,
            project=settings.project,
            workspace=settings.workspace,
            experiment_key=settings.experiment_key,
            mode=settings.mode,
            online=settings.online,
        )
        if settings.experiment_name is not None:
            self._experiment.set_name(settings.experiment_name)

    def write(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            last = self._last.get(name)
            if last is None or samples - last >= self._interval:
                self._last[name] = samples
                self._experiment.log_metric(name=name, value=value, step=samples)


class WallClock(StepObserver):
    """Times of every step by the device's clock, printed on rank 0 and written to ``monitor``.

    A time is the sum over a step's micro-steps. Backward contains reductions, which run
    concurrently. A part that was not observed is "not measured".
    """

    def __init__(
        self, device: torch.device, monitor: Monitor, *, say: Callable[[str], None]
    ) -> None:
        self._device = device
        self._begun: dict[str, Any] = {}  # starts of parts that have not ended
        self._spans: dict[str, list[tuple[Any, Any]]] = {part: [] for part in _NAMES}
        self._monitor = monitor
        self._say = say
        self.last_ms: Mapping[str, float] = {}
        """The last step's times by DeepSpeed's names."""

    def _begin(self, part: str) -> None:
        self._begun[part] = self._now()

    def _end(self, part: str) -> None:
        now = self._now()
        begun, spans = self._begun.pop(part, now), self._spans[part]
        if spans and isinstance(now, float):  # keep only the sum, so that memory does not grow
            spans[0] = spans[0][0], spans[0][1] + (now - begun)
        else:
            spans.append((begun, now))

    def _now(self) -> torch.Event | float:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    begin_forward = partialmethod(_begin, "forward")
    end_forward = partialmethod(_end, "forward")
    begin_backward = partialmethod(_begin, "backward")
    end_backward = partialmethod(_end, "backward")
    begin_step = partialmethod(_begin, "step")
    end_step = partialmethod(_end, "step")

    def step_done(self, facts: StepFacts) -> None:
        times: dict[str, float] = {}
        for part, spans in self._spans.items():
            for begun, ended in spans:
                if isinstance(ended, torch.Event):
                    ended.synchronize()
                    ms = begun.elapsed_time(ended)
                else:
                    ms = 1e3 * (ended - begun)
                times[part] = times.get(part, 0.0) + ms
            spans.clear()
        self.last_ms = {_NAMES[name]: ms for name, ms in times.items()}
        if self._monitor.enabled:
            prefix, samples = "Train/Samples/elapsed_time_ms_", facts.global_samples
            self._monitor.write_events([(prefix + n, ms, samples) for n, ms in times.items()])
        told = dict.fromkeys(_NAMES.values(), "not measured")
        told |= {name: f"{ms:.2f}" for name, ms in self.last_ms.items()}
        self._say("time (ms)" + "".join(f" | {name}: {text}" for name, text in told.items()))


class Throughput(StepObserver):
    """Samples per second, printed every ``every`` steps over the steps since the last line."""

    def __init__(self, device: torch.device, every: int, *, say: Callable[[str], None]) -> None:
        self._device = device
        self._every = every
        self._say = say
        self._since: tuple[float, int] | None = None  # time and samples at the interval's start

    def step_done(self, facts: StepFacts) -> None:
        if self._since is None:
            self._since = self._now(), facts.global_samples
        elif facts.global_steps % self._every == 0:
            begun, samples = self._since
            self._since = self._now(), facts.global_samples
            rate = (facts.global_samples - samples) / max(self._since[0] - begun, 1e-9)
            self._say(f"step {facts.global_steps}: {rate:.4g} samples/s")

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()


class ThroughputTimer:
    """``engine.tput_timer``: samples per second of the whole run, and a count of epochs."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.epoch_count = 0
        self.global_step_count = 0
        self._first: tuple[float, int] | None = None  # time and samples after the first step
        self._last = (0.0, 0)

    def update_epoch_count(self) -> None:
        self.epoch_count += 1

    def step_done(self, facts: StepFacts) -> None:
        self.global_step_count = facts.global_steps
        self._last = time.perf_counter(), facts.global_samples
        self._first = self._first or self._last

    def avg_samples_per_sec(self) -> float:
        begun, samples = self._first or self._last
        if self._last[1] == samples:
            return float("-inf")
        return (self._last[1] - samples) / max(self._last[0] - begun, 1e-9)


class MemoryBreakdown(StepObserver):
    """Printer of the memory that device and process hold after each part of a micro-step."""

    def __init__(self, device: torch.device, *, say: Callable[[str], None]) -> None:
        self._device = device
        self._say = say

    def _print(self, part: str) -> None:
        held = [f"host {used_bytes(_HOST) / _GB:.3f}"]
        if self._device.type != "cpu":
            now = torch.accelerator.memory_allocated(self._device)
            most = torch.accelerator.max_memory_allocated(self._device)
            held.insert(0, f"device {now / _GB:.3f} (peak {most / _GB:.3f})")
        self._say(f"memory after {part} (GB): {', '.join(held)}")

    end_forward = partialmethod(_print, "forward")
    end_backward = partialmethod(_print, "backward")
    end_step = partialmethod(_print, "step")


class FlopsProfiler(StepObserver):
    """Counter of this rank's operations in step ``profile_step``, by torch's `FlopCounterMode`.

    Counts matrix products, convolutions and attention. The count of forward is by module. The count
    of backward includes recomputation.
    """

    def __init__(self, settings: FlopsProfilerSettings, *, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._say = say
        self._step = 0
        self._counter: FlopCounterMode | None = None
        self.forward: dict[str, int] = defaultdict(int)  # operations by module
        self.backward = 0
        self._is_backward_counted = True

    def begin_forward(self) -> None:
        if self._step == self._settings.profile_step and self._counter is None:
            self._counter = FlopCounterMode(display=False)
            self._counter.__enter__()  # type: ignore[no-untyped-call]

    begin_backward = begin_forward

    def end_forward(self) -> None:
        for module, by_operator in self._end().items():
            self.forward[module] += sum(by_operator.values())

    def end_backward(self) -> None:
        self.backward += sum(self._end().get(_ALL, {}).values())

    def begin_plain_backward(self) -> None:
        """Record that this backward is not counted: a counter cannot start during a backward."""
        if self._step == self._settings.profile_step:
            self._is_backward_counted = False

    def end_plain_backward(self) -> None:
        pass

    def step_done(self, facts: StepFacts) -> None:
        if self._step == self._settings.profile_step:
            if self._settings.output_file is None:
                self._say(self.report())
            else:
                path = Path(self._settings.output_file)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(self.report() + "\n", encoding="utf-8")
        self._step = facts.global_steps

    def report(self) -> str:
        total = self.forward[_ALL]
        backward = (
            f"{self.backward:,}"
            if self._is_backward_counted
            else "not counted: call engine.backward(loss) in place of loss.backward()"
        )
        lines = [
            f"floating-point operations of step {self._settings.profile_step} on this rank",
            f"forward:  {total:,}",
            f"backward: {backward}",
        ]
        names = sorted(name for name in self.forward if name != _ALL)
        deepest = self._settings.module_depth
        kept = [name for name in names if deepest < 0 or name.count(".") <= deepest]
        for depth in sorted({name.count(".") for name in kept}):
            level = [name for name in kept if name.count(".") == depth]
            most = sorted(level, key=lambda name: -self.forward[name])
            top = ", ".join(self._row(n, total) for n in most[: self._settings.top_modules])
            lines.append(f"most at depth {depth}: {top}")
        if self._settings.detailed:
            lines += [f"  {self._row(name, total)}" for name in kept]
        return "\n".join(lines)

    def _row(self, name: str, total: int) -> str:
        return f"{name} {self.forward[name]:,} ({self.forward[name] / max(total, 1):.1%})"

    def _end(self) -> dict[str, dict[object, int]]:
        counter, self._counter = self._counter, None
        if counter is None:
            return {}
        counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return dict(counter.get_flop_counts())


class CommunicationLog(StepObserver):
    """Sums of `zero_core.Engine.comm_report` over steps. Collectives overlap, so none is timed."""

    def __init__(
        self, engine: ShardedModel, settings: CommsLoggerSettings, *, say: Callable[[str], None]
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._say = say
        self.steps = 0
        """Steps added up so far."""
        self._sums: dict[str, Counter[str]] = {}
        _logs.add(self)

    def step_done(self, facts: StepFacts) -> None:
        self.steps += 1
        for row in self._engine.comm_report():
            # DeepSpeed's names are longer: all_gather_into_tensor, reduce_scatter_tensor.
            is_named = any(name.startswith(row.collective) for name in self._settings.prof_ops)
            if not self._settings.prof_all and not is_named:
                continue
            name = f"{row.collective} ({row.content})" if self._settings.debug else row.collective
            calls, within, between = row.num_calls, row.within_node_bytes, row.between_nodes_bytes
            found = {"count": calls, "within_node_bytes": within, "between_nodes_bytes": between}
            self._sums.setdefault(name, Counter()).update(found)
            if self._settings.verbose:
                self._say(
                    f"comm op: {name} | step: {facts.global_steps} | calls: {calls} | "
                    f"bytes within node: {within} | bytes between nodes: {between}"
                )

    def summary(self) -> dict[str, dict[str, int]]:
        return {name: dict(sums) for name, sums in self._sums.items()}

    def print(self) -> None:
        lines = [
            f"{'Comm. Op': <34}{'Count': >12}{'Sent in node (B)': >20}{'Between nodes (B)': >20}"
        ]
        for name, row in self._sums.items():
            count, within, between = row.values()
            lines.append(f"{name: <34}{count: >12}{within: >20}{between: >20}")
        self._say("\n".join([*lines, f"{self.steps} steps, rank {self._engine.rank}"]))


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print the bytes sent so far, on rank 0 (``deepspeed.comm.log_summary``).

    With ``return_dict`` it also returns the numbers, on every rank.

    Raises:
        ValueError: ``show_straggler`` is true, or no engine logs its communication.
    """
    if show_straggler:
        raise ValueError(
            "log_summary(show_straggler=True) is not served: collectives run beside compute and "
            "are not timed; leave it out"
        )
    logs = list(_logs)
    if not logs:
        raise ValueError(
            "nothing was logged: set comms_logger.enabled to true in the configuration"
        )
    for log in logs:
        log.print()
    summary = {name: row for log in logs for name, row in log.summary().items()}
    return {"summary": summary} if return_dict else None
