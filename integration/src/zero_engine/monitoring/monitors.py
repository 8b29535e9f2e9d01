"""Observers of an engine's steps, and sinks of scalars: TensorBoard, CSV files, Comet and others.

An engine calls its observers at the borders of forward, backward and step, in the order of its
list. Observers change no number of the training.

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
from typing import Any, Protocol

from zero_core.errors import ConfigError
from zero_engine.monitoring.settings import (
    CometSettings,
    CsvSettings,
    MonitorSettings,
    TensorBoardSettings,
    WandbSettings,
)

Event = tuple[str, Any, int]
"""Name, value, samples so far."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Facts of a step that has just ended. Skipped steps count."""

    global_steps: int
    global_samples: int
    """Samples so far, over all ranks."""
    lr: Sequence[float]
    """Learning rate of each parameter group, after the scheduler's step."""
    loss_scale: float | None
    """Loss scale after the step, None without fp16."""


class StepObserver:
    """Observer that the engine calls on every rank.

    Each ``end_`` method is called even if the part that it ends has raised an error.
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
        """Observe the end of a script's ``loss.backward()``, just before it returns."""
        self.end_backward()

    def begin_step(self) -> None:
        """Observe the start of a micro-step's ``step()``, whether it updates or not."""

    def end_step(self) -> None:
        """Observe the end of a micro-step's ``step()``."""

    def step_done(self, facts: StepFacts) -> None:
        """Observe the end of a step, after ``end_step`` of its last micro-step."""


class Sink(Protocol):
    """Destination of events."""

    def write(self, events: Sequence[Event]) -> None:
        pass


class Monitor:
    """Writer of (name, value, samples) to every sink, on rank 0. ``engine.monitor`` is one.

    ``enabled`` is true on every rank if the configuration asks for a sink.
    """

    def __init__(self, settings: MonitorSettings, *, rank: int) -> None:
        self.enabled = settings.enabled
        kinds: Mapping[str, Callable[[Any], Sink]] = {
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
    """A file per name in ``output_path/job_name``, with a column ``step`` and one for the value."""

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
    """Experiment of Comet. Logs a value of each name once per ``samples_log_interval`` samples."""

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
