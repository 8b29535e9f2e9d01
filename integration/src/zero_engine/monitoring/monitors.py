"""Observers of an engine's steps, and sinks of scalars: TensorBoard, CSV files, Comet and others.

An engine owns a list of observers and calls each at the borders of forward, backward and step, in
the order of the list. Observers read; none changes a number of the training.

Names, files and folders are DeepSpeed's, so that what reads its logs reads these. A scalar is a
name ("Train/Samples/lr"), a value, and the number of samples so far.
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
    """A step that has just ended, the skipped ones included."""

    global_steps: int
    """Steps so far, including this step."""
    global_samples: int
    """Samples so far, over all ranks."""
    lr: Sequence[float]
    """Learning rate of each parameter group, after the scheduler's step."""
    loss_scale: float | None
    """Loss scale after the step, None without fp16."""


class StepObserver:
    """Called by the engine on every rank. An ``end_`` is called even if what it ends has failed."""

    def begin_forward(self) -> None:
        """Observe that a forward in training mode begins."""

    def end_forward(self) -> None:
        """Observe that it has ended."""

    def begin_backward(self) -> None:
        """Observe that the backward of a micro-step begins."""

    def end_backward(self) -> None:
        """Observe that it has ended."""

    def begin_plain_backward(self) -> None:
        """Observe the script's own backward, at the first gradient of an output."""
        self.begin_backward()

    def end_plain_backward(self) -> None:
        """Observe the end of that backward, still within it, unless it has failed."""
        self.end_backward()

    def begin_step(self) -> None:
        """Observe that ``step`` of a micro-step begins, whether it updates or not."""

    def end_step(self) -> None:
        """Observe that it has ended."""

    def step_done(self, facts: StepFacts) -> None:
        """Observe the end of a step, after ``end_step`` of its last micro-step."""


class Sink(Protocol):
    """A destination of events."""

    def write(self, events: Sequence[Event]) -> None:
        pass


class Monitor:
    """Writer of events to every sink. ``engine.monitor`` is one.

    Attributes:
        enabled: whether the configuration asks for any, on this rank or another.
    """

    def __init__(self, settings: MonitorSettings, *, rank: int) -> None:
        """Make the sinks that ``settings`` asks for. Rank 0 alone writes.

        Raises:
            ConfigError: a block asks for a library that is not installed.
        """
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
        """Write (name, value, samples) to every sink. Ranks without sinks write nothing."""
        for sink in self._sinks:
            sink.write(event_list)


class Scalars(StepObserver):
    """Writes ``Train/Samples/lr`` and, with fp16, ``Train/Samples/loss_scale``, as DeepSpeed."""

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
    """Event files in ``output_path/job_name``."""

    def __init__(self, settings: TensorBoardSettings) -> None:
        board = _library("torch.utils.tensorboard", "tensorboard", "tensorboard")
        folder = Path(settings.output_path) / settings.job_name
        self._writer = board.SummaryWriter(log_dir=str(folder))

    def write(self, events: Sequence[Event]) -> None:
        for event in events:
            self._writer.add_scalar(*event)
        self._writer.flush()


class _Csv:
    """A file per name in ``output_path/job_name``, with the columns ``step`` and the name's end."""

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
    """A run of Weights & Biases."""

    def __init__(self, settings: WandbSettings) -> None:
        self._wandb = _library("wandb", "wandb", "wandb")
        self._wandb.init(project=settings.project, group=settings.group, entity=settings.team)

    def write(self, events: Sequence[Event]) -> None:
        for name, value, samples in events:
            self._wandb.log({name: value}, step=samples)


class _Comet:
    """An experiment of Comet, with a value of each name per ``samples_log_interval`` samples."""

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
