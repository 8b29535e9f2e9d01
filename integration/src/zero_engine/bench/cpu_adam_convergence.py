"""What narrow optimizer states cost in loss: a small GPT-2 on real text, several widths of state.

All sides of a **trial** start from the same bf16 weights and go in step: each batch is given to
every side before the next one is drawn. The **wide** side has fp32 moments and an fp32 master
weight. The **narrow** ones differ from it in ``state_dtype`` alone, so their distance to it is what
the width costs. ``torch.optim.AdamW`` on an fp32 copy of the model is the outside oracle: what lies
between it and the others is the rounding of weights, activations and gradients to bf16 as well.

Trials differ in their **seed**, of the first weights and of the order of the text. The text and all
of training are those of the train program, the model is a little larger.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import cpu_adam
from zero_core.lr_schedules import Schedule, make_scheduler
from zero_engine.data import Corpus, prepare_corpus, read_text
from zero_engine.machine import processor_name
from zero_engine.settings import RunSettings, default_config_text, fill_auto
from zero_engine.train import build_model, make_deterministic

__all__ = ["Settings", "compare"]

MODEL = RunSettings(layers=4, width=160, heads=5, context=128, vocab=1024)
"""1.4 million parameters."""
MICRO_BATCH = 8
HELD_OUT_WINDOWS = 256
LAST_STEPS = 50
"""The training loss is the mean over this many steps at the end."""
BAR_PERCENT = 0.5
"""How far a narrow side's loss may be from the wide one's."""
PAGE_WIDTH = 110
NUM_LINES = 10
"""Lines of progress per trial, where there is no terminal to draw a bar on."""

WIDE = "float32"
NARROW = ("int8", "bfloat16")
ORACLE = "torch"
LABELS = {
    WIDE: "cpu-adam, fp32 states",
    "int8": "cpu-adam, int8 states",
    "bfloat16": "cpu-adam, bf16 states",
    ORACLE: "torch AdamW, all fp32",
}
"""By ``state_dtype``, the oracle last."""
COLORS = {WIDE: "tab:gray", "int8": "tab:green", "bfloat16": "tab:orange", ORACLE: "tab:blue"}


@dataclass(frozen=True)
class Settings:
    """How long and how often."""

    steps: int
    seeds: int
    """Trials, with the seeds 0, 1, ..."""
    threads: int


@dataclass
class Side:
    """One model and its optimizer, on their way."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    max_norm: float
    losses: list[float] = field(default_factory=list)
    """Of every step, in nats per token."""

    def take_step(self, ids: Tensor) -> None:
        """Forward, backward, update."""
        loss = _loss(self.model, ids)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.losses.append(loss.item())

    @torch.no_grad()
    def held_out_loss(self, corpus: Corpus) -> float:
        """Mean over the first held-out windows, the same for everyone."""
        batches = corpus.held_out_batches(
            HELD_OUT_WINDOWS, rank=0, world_size=1, micro_batch_size=MICRO_BATCH
        )
        return statistics.fmean(_loss(self.model, ids).item() for ids in batches)


@dataclass(frozen=True)
class Outcome:
    """Where one side of one trial came to."""

    training: float
    """Mean loss over the last steps."""
    held_out: float
    losses: Sequence[float]
    """Of every step."""


Trial = dict[str, Outcome]
"""One seed's outcomes, by side."""


def compare(settings: Settings, *, output: Path) -> None:
    """Run all trials, print a table, write ``cpu_adam_convergence.json`` and ``.png``."""
    console = Console(width=None if sys.stdout.isatty() else PAGE_WIDTH)
    before = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    started_at = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as scratch, _Watch(settings, console) as watch:
            text = read_text(None)
            prepare_corpus(text, Path(scratch), vocab_size=MODEL.vocab, context=MODEL.context)
            trials = [
                _run(settings, Corpus.open(Path(scratch), seed=seed), watch)
                for seed in range(settings.seeds)
            ]
    finally:
        torch.set_num_threads(before)
    console.print(_table(trials))
    output.mkdir(parents=True, exist_ok=True)
    report = {
        "settings": {
            **asdict(settings),
            "micro_batch": MICRO_BATCH,
            "last_steps": min(LAST_STEPS, settings.steps),
            "held_out_windows": HELD_OUT_WINDOWS,
            "model": {
                name: getattr(MODEL, name)
                for name in ("layers", "width", "heads", "context", "vocab")
            },
            "training": _config(settings.steps),
        },
        "machine": {
            "processor": processor_name(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "isa": cpu_adam.active_isa(),
        },
        "wall_s": time.perf_counter() - started_at,
        "bar_percent": BAR_PERCENT,
        "seeds": [_summary(trial, with_curves=True) for trial in trials],
        "mean": _summary(_mean(trials), with_curves=False),
    }
    path = output / "cpu_adam_convergence.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    _plot(trials, path.with_suffix(".png"))
    console.print(f"written to {output}", highlight=False)


def _run(settings: Settings, corpus: Corpus, watch: _Watch) -> Trial:
    sides = dict(_sides(settings, corpus))
    for step in range(settings.steps):
        ids = corpus.batch(step, rank=0, world_size=1, micro_batch_size=MICRO_BATCH)
        for side in sides.values():
            side.take_step(ids)
        watch.see(corpus.seed, step + 1, {name: side.losses for name, side in sides.items()})
    return {
        name: Outcome(
            training=statistics.fmean(side.losses[-LAST_STEPS:]),
            held_out=side.held_out_loss(corpus),
            losses=side.losses,
        )
        for name, side in sides.items()
    }


def _sides(settings: Settings, corpus: Corpus) -> Iterator[tuple[str, Side]]:
    """All sides of a trial, each with a copy of the same model."""
    config = _config(settings.steps)
    params = config["optimizer"]["params"]
    make_deterministic(corpus.seed, torch.device("cpu"))
    # Rounded first: what the oracle widens again is then where the others start.
    start = _copy(build_model(MODEL, corpus.vocab_size), torch.bfloat16)
    for name in LABELS:
        model = _copy(start, torch.float32 if name == ORACLE else torch.bfloat16)
        optimizer: torch.optim.Optimizer
        if name == ORACLE:
            optimizer = torch.optim.AdamW(model.parameters(), **params)
        else:
            optimizer = cpu_adam.CPUAdam(model.parameters(), state_dtype=name, **params)
        schedule = make_scheduler(
            optimizer, config["scheduler"]["type"], config["scheduler"]["params"]
        )
        yield name, Side(model, optimizer, schedule, config["gradient_clipping"])


def _copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    return copy.deepcopy(model).to(dtype)


def _config(steps: int) -> dict[str, Any]:
    """The train program's optimizer, schedule and clipping, for a run of ``steps``."""
    config = fill_auto(json.loads(default_config_text()), steps)
    return {name: config[name] for name in ("optimizer", "scheduler", "gradient_clipping")}


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


class _Watch:
    """Progress on the screen; use it as a context manager."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self._settings = settings
        self._console = console
        self._every = max(1, settings.steps // NUM_LINES)
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=settings.seeds * settings.steps)

    def __enter__(self) -> _Watch:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def see(self, seed: int, step: int, losses: dict[str, list[float]]) -> None:
        """Show the wide side's loss so far, and how far the others' are from it."""
        recent = {name: statistics.fmean(values[-LAST_STEPS:]) for name, values in losses.items()}
        line = f"seed {seed}  {WIDE} {recent[WIDE]:.3f}" + "".join(
            f"  {name} {_percent(recent[name], recent[WIDE]):+.2f}%"
            for name in recent
            if name != WIDE
        )
        self._progress.update(self._task, advance=1, description=line)
        if not self._console.is_terminal and step % self._every == 0:
            self._console.print(f"step {step}/{self._settings.steps}  {line}", highlight=False)


def _percent(value: float, reference: float) -> float:
    """How much higher ``value`` is, in percent."""
    return 100.0 * (value / reference - 1.0)


def _is_met(difference_percent: float) -> bool:
    return abs(difference_percent) <= BAR_PERCENT  # and not for NaN


def _mean(trials: Sequence[Trial]) -> Trial:
    return {
        name: Outcome(
            training=statistics.fmean(trial[name].training for trial in trials),
            held_out=statistics.fmean(trial[name].held_out for trial in trials),
            losses=[
                statistics.fmean(losses)
                for losses in zip(*(trial[name].losses for trial in trials), strict=True)
            ],
        )
        for name in LABELS
    }


def _summary(trial: Trial, *, with_curves: bool) -> dict[str, Any]:
    """Plain builtins for the result file."""
    summary: dict[str, Any] = {}
    for name, outcome in trial.items():
        entry: dict[str, Any] = {}
        for kind in ("training", "held_out"):
            loss = getattr(outcome, kind)
            entry[kind] = {
                "loss": loss,
                "to_float32_percent": _percent(loss, getattr(trial[WIDE], kind)),
                "to_torch_percent": _percent(loss, getattr(trial[ORACLE], kind)),
            }
            if name in NARROW:
                entry[kind]["is_met"] = _is_met(entry[kind]["to_float32_percent"])
        if with_curves:
            entry["losses"] = list(outcome.losses)
        summary[name] = entry
    return summary


def _table(trials: Sequence[Trial]) -> Table:
    table = Table(
        title="a GPT-2 on real text",
        caption=f"loss, nats per token; bar: within {BAR_PERCENT:g}% of cpu-adam's fp32 states",
    )
    for heading in ("seed", "side"):
        table.add_column(heading, no_wrap=True)
    for heading in ("training", "to fp32", "to torch", "bar", "held out", "to fp32", "bar"):
        table.add_column(heading, justify="right", no_wrap=True)
    rows = [*((str(seed), trial) for seed, trial in enumerate(trials)), ("mean", _mean(trials))]
    for label, trial in rows:
        for name, entry in _summary(trial, with_curves=False).items():
            training, held_out = entry["training"], entry["held_out"]
            table.add_row(
                label if name == WIDE else "",
                LABELS[name],
                f"{training['loss']:.4f}",
                f"{training['to_float32_percent']:+.2f}%",
                f"{training['to_torch_percent']:+.2f}%",
                _verdict(training),
                f"{held_out['loss']:.4f}",
                f"{held_out['to_float32_percent']:+.2f}%",
                _verdict(held_out),
            )
        table.add_section()
    return table


def _verdict(entry: dict[str, Any]) -> str:
    return {None: "", True: "met", False: "missed"}[entry.get("is_met")]


def _plot(trials: Sequence[Trial], path: Path) -> None:
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    loss_axes, difference_axes = figure.subplots(1, 2)
    for name, outcome in _mean(trials).items():
        _draw(loss_axes, _smoothed(outcome.losses), label=LABELS[name], color=COLORS[name])
    loss_axes.set_ylabel("training loss (nats per token), mean over seeds")
    for number, trial in enumerate(trials):
        wide = _smoothed(trial[WIDE].losses)
        for name in (*NARROW, ORACLE):
            other = _smoothed(trial[name].losses)
            difference = [_percent(*pair) for pair in zip(other, wide, strict=True)]
            label = LABELS[name] if number == 0 else None
            _draw(difference_axes, difference, label=label, color=COLORS[name])
    difference_axes.axhspan(-BAR_PERCENT, BAR_PERCENT, color="tab:gray", alpha=0.15)
    difference_axes.set_ylabel(f"loss against {LABELS[WIDE]} (%), each seed")
    for axes in (loss_axes, difference_axes):
        axes.set_xlabel(f"step (means over {LAST_STEPS})")
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)


def _draw(axes: Axes, values: Sequence[float], *, label: str | None, color: str) -> None:
    axes.plot(range(1, len(values) + 1), values, label=label, color=color, linewidth=1)


def _smoothed(losses: Sequence[float]) -> list[float]:
    """Each step's mean with those before it, up to `LAST_STEPS`; the last is the training loss."""
    return [
        statistics.fmean(losses[max(0, end - LAST_STEPS) : end])
        for end in range(1, len(losses) + 1)
    ]
