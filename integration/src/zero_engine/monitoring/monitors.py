"""Observers of an engine's steps, and sinks of scalars: TensorBoard, CSV files, Comet and others.

An engine calls its observers at the start and end of forward, backward and step, in the order of
its list. Observers do not change the results of training.

Names, files and folders are DeepSpeed's, so that programs that read DeepSpeed's logs can read
these. A scalar is a name ("Train/Samples/lr"), a value, and the number of samples so far.
"""

from __future__ import annotations

import csv
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from zero_core.errors import ConfigError

COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")
"""Names in ``comm_report()``. DeepSpeed's are longer: all_gather_into_tensor."""


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
        blocks = (self.tensorboard, self.csv_monitor, self.wandb, self.comet)
        return any(block.enabled for block in blocks)


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
