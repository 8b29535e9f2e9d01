"""Loss of a small GPT-2 on real text: cpu-adam's fp32, int8 and bf16 states, and torch.

All sides of a **trial** start from the same bf16 weights and take steps together: each batch is
given to every side before the next one is drawn. The **wide** side has fp32 moments and an fp32
master weight. The **narrow** ones differ from it in ``state_dtype`` alone, so their distance to it
is the cost of the width. ``torch.optim.AdamW`` on an fp32 copy of the model is the outside oracle:
its distance to the others includes the rounding of weights, activations and gradients to bf16.

Trials differ in their **seed**, of the first weights and of the order of the text. The text and the
training are those of the train program, the model is a little larger.
"""

from __future__ import annotations

import copy
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import Tensor, nn

import cpu_adam
from benchmarks.harness.options import RESULTS, AllThreads, Output
from benchmarks.harness.ranks import Row, write_json
from benchmarks.harness.report import Axes, empty_table, machine, make_console, save_panels, word
from benchmarks.harness.rounds import Say
from zero_core.optim.schedules.factory import Schedule, make_scheduler
from zero_engine.train.data import Corpus, prepare_corpus, read_text
from zero_engine.train.program import build_model, make_deterministic
from zero_engine.train.settings import RunSettings, default_config_text, fill_auto

MODEL = RunSettings(layers=4, width=160, heads=5, context=128, vocab=1024)
"""1.4 million parameters."""
MICRO_BATCH = 8
HELD_OUT_WINDOWS = 256
LAST_STEPS = 50
"""The training loss is the mean over this many steps at the end."""
BAR_PERCENT = 0.5
"""How far a narrow side's loss may be from the wide one's."""
NUM_LINES = 10
"""Lines of progress per trial."""

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


@dataclass
class Side:
    """One model and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    max_norm: float
    losses: list[float] = field(default_factory=list)
    """Of every step, in nats per token."""

    def take_step(self, ids: Tensor) -> None:
        loss = _loss(self.model, ids)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.losses.append(loss.item())

    @torch.no_grad()
    def held_out_loss(self, corpus: Corpus) -> float:
        """Return the mean over the first held-out windows, the same for everyone."""
        batches = corpus.held_out_batches(
            HELD_OUT_WINDOWS, rank=0, world_size=1, micro_batch_size=MICRO_BATCH
        )
        return statistics.fmean(_loss(self.model, ids).item() for ids in batches)


Trial = Mapping[str, Mapping[str, Any]]
"""One seed's outcomes, by side: ``training``, ``held_out``, and the ``losses`` of every step."""


def main(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of every run.")] = 500,
    seeds: Annotated[int, typer.Option(min=1, help="Trials, each with its own seed.")] = 3,
    threads: AllThreads = 0,
    output: Output = RESULTS,
) -> None:
    """Run all trials, print a table, write ``cpu_adam_convergence.json`` and ``.png``."""
    console = make_console()
    before = torch.get_num_threads()
    threads = threads or before
    torch.set_num_threads(threads)
    started_at = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            prepare_corpus(read_text(None), folder, vocab_size=MODEL.vocab, context=MODEL.context)
            corpora = [Corpus.open(folder, seed=seed) for seed in range(seeds)]
            trials = [_run(steps, corpus, console.print) for corpus in corpora]
    finally:
        torch.set_num_threads(before)
    console.print(table(trials))
    output.mkdir(parents=True, exist_ok=True)
    sizes = ("layers", "width", "heads", "context", "vocab")
    settings = {
        "steps": steps,
        "seeds": seeds,
        "threads": threads,
        "micro_batch": MICRO_BATCH,
        "last_steps": min(LAST_STEPS, steps),
        "held_out_windows": HELD_OUT_WINDOWS,
        "model": {name: getattr(MODEL, name) for name in sizes},
        "training": _config(steps),
    }
    report = {
        "settings": settings,
        "machine": {**machine(), "isa": cpu_adam.active_isa()},
        "wall_s": time.perf_counter() - started_at,
        "bar_percent": BAR_PERCENT,
        "seeds": [_with_losses(trial) for trial in trials],
        "mean": summary(_mean(trials)),
    }
    path = output / "cpu_adam_convergence.json"
    write_json(path, report)
    _save_picture(trials, path.with_suffix(".png"))
    console.print(f"written to {output}")


def _run(steps: int, corpus: Corpus, say: Say) -> Trial:
    sides = dict(_sides(steps, corpus))
    for step in range(1, steps + 1):
        ids = corpus.batch(step - 1, rank=0, world_size=1, micro_batch_size=MICRO_BATCH)
        for side in sides.values():
            side.take_step(ids)
        if step % max(1, steps // NUM_LINES) == 0:
            recent = {name: statistics.fmean(s.losses[-LAST_STEPS:]) for name, s in sides.items()}
            others = (
                f"  {name} {_percent(loss, recent[WIDE]):+.2f}%"
                for name, loss in recent.items()
                if name != WIDE
            )
            about = f"step {step}/{steps}  seed {corpus.seed}  {WIDE} {recent[WIDE]:.3f}"
            say(about + "".join(others))
    return {
        name: {
            "training": statistics.fmean(side.losses[-LAST_STEPS:]),
            "held_out": side.held_out_loss(corpus),
            "losses": side.losses,
        }
        for name, side in sides.items()
    }


def _sides(steps: int, corpus: Corpus) -> Iterator[tuple[str, Side]]:
    """Yield all sides of a trial, each with a copy of the same model."""
    config = _config(steps)
    params = config["optimizer"]["params"]
    make_deterministic(corpus.seed, torch.device("cpu"))
    # Rounded first: the oracle's fp32 weights equal the others' then.
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
    """Return the train program's optimizer, schedule and clipping, for a run of ``steps``."""
    config = fill_auto(json.loads(default_config_text()), steps)
    return {name: config[name] for name in ("optimizer", "scheduler", "gradient_clipping")}


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def _percent(value: float, reference: float) -> float:
    """Return how much higher ``value`` is, in percent."""
    return 100.0 * (value / reference - 1.0)


def _mean(trials: Sequence[Trial]) -> Trial:
    return {
        name: {
            **{
                kind: statistics.fmean(trial[name][kind] for trial in trials)
                for kind in ("training", "held_out")
            },
            "losses": [
                statistics.fmean(losses)
                for losses in zip(*(trial[name]["losses"] for trial in trials), strict=True)
            ],
        }
        for name in LABELS
    }


def summary(trial: Trial) -> dict[str, Row]:
    """Return both losses of every side, each with its distances and its bar."""
    return {
        name: {k: _held_against(trial, name, k) for k in ("training", "held_out")} for name in trial
    }


def _held_against(trial: Trial, name: str, kind: str) -> Row:
    loss = trial[name][kind]
    to_wide = _percent(loss, trial[WIDE][kind])
    found = {
        "loss": loss,
        "to_float32_percent": to_wide,
        "to_torch_percent": _percent(loss, trial[ORACLE][kind]),
    }
    # NaN meets no bar.
    return found | ({"is_met": abs(to_wide) <= BAR_PERCENT} if name in NARROW else {})


def _with_losses(trial: Trial) -> dict[str, Row]:
    return {name: {**row, "losses": trial[name]["losses"]} for name, row in summary(trial).items()}


def table(trials: Sequence[Trial]) -> Table:
    found = empty_table(
        (
            *("seed", "side", "training", "to fp32", "to torch", "bar"),
            *("held out", "to fp32", "bar"),
        ),
        title="a GPT-2 on real text",
        caption=f"loss, nats per token; bar: within {BAR_PERCENT:g}% of cpu-adam's fp32 states",
        num_names=2,
    )
    for label, trial in [*enumerate(trials), ("mean", _mean(trials))]:
        for name, entry in summary(trial).items():
            training, held_out = entry["training"], entry["held_out"]
            found.add_row(
                str(label) if name == WIDE else "",
                LABELS[name],
                f"{training['loss']:.4f}",
                f"{training['to_float32_percent']:+.2f}%",
                f"{training['to_torch_percent']:+.2f}%",
                word(training.get("is_met")),
                f"{held_out['loss']:.4f}",
                f"{held_out['to_float32_percent']:+.2f}%",
                word(held_out.get("is_met")),
            )
        found.add_section()
    return found


def _save_picture(trials: Sequence[Trial], path: Path) -> None:
    def draw_losses(axes: Axes) -> None:
        for name, side in _mean(trials).items():
            _draw(axes, _smoothed(side["losses"]), name)
        axes.set_ylabel("training loss (nats per token), mean over seeds")
        axes.legend()

    def draw_differences(axes: Axes) -> None:
        for number, trial in enumerate(trials):
            wide = _smoothed(trial[WIDE]["losses"])
            for name in (*NARROW, ORACLE):
                pairs = zip(_smoothed(trial[name]["losses"]), wide, strict=True)
                _draw(axes, [_percent(*pair) for pair in pairs], name, is_named=number == 0)
        axes.axhspan(-BAR_PERCENT, BAR_PERCENT, color="tab:gray", alpha=0.15)
        axes.set_ylabel(f"loss against {LABELS[WIDE]} (%), each seed")
        axes.legend()

    save_panels(path, [("", 13, draw_losses), ("", 13, draw_differences)], columns=2)


def _draw(axes: Axes, values: Sequence[float], name: str, *, is_named: bool = True) -> None:
    steps, label = range(1, len(values) + 1), LABELS[name] if is_named else None
    axes.plot(steps, values, label=label, color=COLORS[name], linewidth=1)
    axes.set_xlabel(f"step (means over {LAST_STEPS})")
    axes.grid(visible=True, alpha=0.3)


def _smoothed(losses: Sequence[float]) -> list[float]:
    """Return the running means over `LAST_STEPS` steps, up to the training loss."""
    return [
        statistics.fmean(losses[max(0, end - LAST_STEPS) : end])
        for end in range(1, len(losses) + 1)
    ]
