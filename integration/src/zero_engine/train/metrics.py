"""Output of a run in progress: a progress bar, TensorBoard, and a JSON log.

Only rank 0 has a `Reporter`. A resumed run first removes later steps from both logs.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from zero_core.adapters import OUTSIDE, Place
from zero_engine.train.options import RunSettings
from zero_engine.train.settings import RunFolder

MIB = 2**20
QUIET_S = 60.0
"""Seconds without output after which a line reports the current work, without a terminal."""


@dataclass(frozen=True)
class StepRecord:
    """Values of one optimizer step, over all ranks."""

    step: int
    loss: float
    """Mean over ranks and micro-batches, in nats per token."""
    learning_rate: float
    grad_norm: float | None
    """Global 2-norm before clipping, if the engine computed it."""
    loss_scale: float
    tokens_per_s: float
    memory_bytes: Sequence[int]
    """Bytes that each rank holds after the step."""


class Reporter:
    """Context manager that writes records to the screen and to the logs.

    A terminal shows a bar with the unit being computed. Otherwise a line names the unit, after each
    minute without output.
    """

    def __init__(
        self, folder: RunFolder, settings: RunSettings, *, first_step: int, place: Place
    ) -> None:
        # Imported here, because the import is slow and `read_metrics` does not need it.
        from torch.utils.tensorboard import SummaryWriter

        self._settings = settings
        self._place = place
        self._said_at = time.monotonic()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._log_place, name="place", daemon=True)
        if folder.metrics.exists():
            # A run that restarts at step 0 repeats the evaluation before the first step.
            entries = read_metrics(folder.metrics) if first_step else []
            kept = [entry for entry in entries if entry["step"] <= first_step]
            lines = "".join(json.dumps(entry) + "\n" for entry in kept)
            folder.metrics.write_text(lines, encoding="utf-8")
        self._log = folder.metrics.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(folder.tensorboard), purge_step=first_step + 1)
        self._console = Console()
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.description}"),
            _PlaceColumn(place),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=settings.steps, completed=first_step)

    def __enter__(self) -> Reporter:
        self._progress.start()
        if not self._console.is_terminal:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        self._has_ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._log.close()
        self._board.close()

    def say(self, text: str) -> None:
        self._said_at = time.monotonic()
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _log_place(self) -> None:
        while not self._has_ended.wait(QUIET_S / 10):
            doing = self._place.doing
            if doing != OUTSIDE and time.monotonic() >= self._said_at + QUIET_S:
                step = int(self._progress.tasks[self._task].completed)
                self.say(f"after step {step}/{self._settings.steps}: {doing}")

    def doing(self, what: str) -> None:
        self._progress.update(self._task, description=what)

    def step(self, record: StepRecord) -> None:
        self._write(asdict(record))
        for name in ("loss", "learning_rate", "grad_norm", "loss_scale", "tokens_per_s"):
            value = getattr(record, name)
            if value is not None:
                self._board.add_scalar(f"train/{name}", value, record.step)
        for rank, num_bytes in enumerate(record.memory_bytes):
            self._board.add_scalar(f"memory_mib/rank{rank}", num_bytes / MIB, record.step)
        memory = "/".join(f"{num_bytes / MIB:.0f}" for num_bytes in record.memory_bytes)
        line = (
            f"loss {record.loss:.3f}  {record.tokens_per_s:,.0f} tokens/s  "
            f"{memory} MiB per rank  lr {record.learning_rate:.2e}  scale {record.loss_scale:g}"
        )
        self._progress.update(self._task, completed=record.step, description=line)
        is_due = record.step % self._settings.log_every == 0
        if not self._console.is_terminal and is_due:
            self.say(f"step {record.step}/{self._settings.steps}  {line}")

    def held_out(self, step: int, loss: float) -> None:
        self._write({"step": step, "held_out_loss": loss})
        self._board.add_scalar("held_out/loss", loss, step)
        self.say(f"step {step}/{self._settings.steps}  held-out loss {loss:.4f}")

    def _write(self, entry: Mapping[str, Any]) -> None:
        self._log.write(json.dumps(entry) + "\n")
        self._log.flush()


class _PlaceColumn(ProgressColumn):
    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place

    def render(self, task: Task) -> Text:
        doing = self._place.doing
        return Text("" if doing == OUTSIDE else doing, style="dim")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a JSON log, in order, without an incomplete last line."""
    entries: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entries.append(cast("dict[str, Any]", json.loads(line)))
        except ValueError:  # the process died while writing this line
            break
    return entries
