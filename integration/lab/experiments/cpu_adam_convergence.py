"""Loss of a small GPT-2 on real text: cpu-adam with fp32, int8 and bf16 states, and torch.

All sides of a trial start from the same bf16 weights and train on the same batches. The wide side
has fp32 moments and fp32 master weights. The narrow sides differ from the wide one in
``state_dtype`` only, so the difference in loss is the cost of the narrower states. The independent
oracle is ``torch.optim.AdamW`` on an fp32 copy of the model. The other sides also round weights,
activations and gradients to bf16.

Each trial has a seed, which determines the initial weights and the order of the text. The text and
the training are those of the train program. The model is slightly larger.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

import cpu_adam
from benchmarks.harness.options import RESULTS, AllThreads, Output, use_threads
from benchmarks.harness.ranks import Row
from benchmarks.harness.report import Column, Panel, Section, machine, publish
from lab.text import (
    LAST_STEPS,
    curves,
    mean_curve,
    percent_over,
    text_folder,
    training_config,
    training_loss,
)
from zero_core.schedules import Schedule, make_scheduler
from zero_engine.train.data import Corpus
from zero_engine.train.options import RunSettings
from zero_engine.train.program import build_model, make_deterministic

MODEL = RunSettings(layers=4, width=160, heads=5, context=128, vocab=1024)
"""1.4 million parameters."""
MICRO_BATCH = 8
HELD_OUT_WINDOWS = 256
BAR_PERCENT = 0.5
"""Largest accepted difference of a narrow side's loss from the wide side's."""
NUM_LINES = 10
"""Lines of progress per trial."""
WIDE, NARROW, ORACLE = "float32", ("int8", "bfloat16"), "torch"
LABELS = {
    WIDE: "cpu-adam, fp32 states",
    "int8": "cpu-adam, int8 states",
    "bfloat16": "cpu-adam, bf16 states",
    ORACLE: "torch AdamW, all fp32",
}
"""Names by ``state_dtype``. The oracle is the last."""
COLORS = dict(zip(LABELS.values(), ("C7", "C2", "C1", "C0"), strict=True))
KINDS = ("training", "held_out")


@dataclass
class Side:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    max_norm: float
    losses: list[float] = field(default_factory=list)
    """Losses of every step, in nats per token."""

    def take_step(self, ids: Tensor) -> None:
        loss = self.loss(ids)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.losses.append(loss.item())

    def loss(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss

    @torch.no_grad()
    def outcome(self, corpus: Corpus) -> Row:
        """Return the training loss, and the held-out loss over windows shared by all sides."""
        batches = corpus.held_out_batches(
            HELD_OUT_WINDOWS, rank=0, world_size=1, micro_batch_size=MICRO_BATCH
        )
        return {
            "training": training_loss(self.losses),
            "held_out": statistics.fmean(self.loss(ids).item() for ids in batches),
            "losses": self.losses,
        }


Trial = Mapping[str, Row]
"""One seed's outcomes, by side: ``training``, ``held_out``, and the ``losses`` of every step."""


def main(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of every run.")] = 500,
    seeds: Annotated[int, typer.Option(min=1, help="Trials, each with its own seed.")] = 3,
    threads: AllThreads = 0,
    output: Output = RESULTS,
) -> None:
    """Run all trials, write ``cpu_adam_convergence.json`` and ``.png``, print a table."""
    started_at = time.perf_counter()
    num_threads = use_threads(threads)
    with text_folder(vocab=MODEL.vocab, context=MODEL.context) as folder:
        corpora = [Corpus.open(folder, seed=seed) for seed in range(seeds)]
        trials = [_run(steps, corpus) for corpus in corpora]
    mean = {
        name: {kind: statistics.fmean(trial[name][kind] for trial in trials) for kind in KINDS}
        for name in LABELS
    }
    sizes = ("layers", "width", "heads", "context", "vocab")
    report = {
        "settings": {
            "steps": steps,
            "seeds": seeds,
            "threads": num_threads,
            "micro_batch": MICRO_BATCH,
            "last_steps": min(LAST_STEPS, steps),
            "held_out_windows": HELD_OUT_WINDOWS,
            "model": {name: vars(MODEL)[name] for name in sizes},
            "training": training_config(steps),
        },
        "machine": {**machine(), "isa": cpu_adam.active_isa()},
        "wall_s": time.perf_counter() - started_at,
        "bar_percent": BAR_PERCENT,
        "seeds": [
            {name: {**row, "losses": trial[name]["losses"]} for name, row in summary(trial).items()}
            for trial in trials
        ],
        "mean": summary(mean),
    }
    found = section({**{f"seed {n}": trial for n, trial in enumerate(trials)}, "mean": mean})
    pictured = Section("", {}, (), panels=panels(trials, steps))
    publish(output, "cpu_adam_convergence", report, [found, pictured], columns=2)


def _run(steps: int, corpus: Corpus) -> Trial:
    sides = _sides(steps, corpus)
    for step in range(1, steps + 1):
        ids = corpus.batch(step - 1, rank=0, world_size=1, micro_batch_size=MICRO_BATCH)
        for side in sides.values():
            side.take_step(ids)
        if step % max(1, steps // NUM_LINES) == 0:
            recent = {name: training_loss(side.losses) for name, side in sides.items()}
            wide = recent.pop(WIDE)
            others = (f"  {n} {percent_over(loss, wide):+.2f}%" for n, loss in recent.items())
            about = f"step {step}/{steps}  seed {corpus.seed}  {WIDE} {wide:.3f}"
            print(about + "".join(others), flush=True)
    return {name: side.outcome(corpus) for name, side in sides.items()}


def _sides(steps: int, corpus: Corpus) -> dict[str, Side]:
    """Return all sides of a trial, each with a copy of the same model."""
    config = training_config(steps)
    params = config["optimizer"]["params"]
    make_deterministic(corpus.seed, torch.device("cpu"))
    # Rounded to bf16 before copying, so that the oracle's fp32 weights equal the other sides'.
    start: nn.Module = build_model(MODEL, corpus.vocab_size)
    start.to(torch.bfloat16)
    sides = {}
    for name in LABELS:
        model = copy.deepcopy(start)
        optimizer: torch.optim.Optimizer
        if name == ORACLE:
            optimizer = torch.optim.AdamW(model.float().parameters(), **params)
        else:
            optimizer = cpu_adam.CPUAdam(model.parameters(), state_dtype=name, **params)
        scheduler = config["scheduler"]
        schedule = make_scheduler(optimizer, scheduler["type"], scheduler["params"])
        sides[name] = Side(model, optimizer, schedule, config["gradient_clipping"])
    return sides


def summary(trial: Trial) -> dict[str, Row]:
    """Return both losses of every side, with their differences and whether they meet the bar."""

    def held_against(name: str, kind: str) -> Row:
        loss = trial[name][kind]
        to_wide = percent_over(loss, trial[WIDE][kind])
        found = {
            "loss": loss,
            "to_float32_percent": to_wide,
            "to_torch_percent": percent_over(loss, trial[ORACLE][kind]),
        }
        # NaN meets no bar.
        return found | ({"is_met": abs(to_wide) <= BAR_PERCENT} if name in NARROW else {})

    return {name: {kind: held_against(name, kind) for kind in KINDS} for name in trial}


def section(trials: Mapping[str, Trial]) -> Section:
    rows = {
        f"{label}: {LABELS[name]}": row
        for label, trial in trials.items()
        for name, row in summary(trial).items()
    }

    def column(heading: str, kind: str, key: str, spec: str = "") -> Column:
        return Column(heading, lambda row: row[kind].get(key), spec)

    columns = (
        column("training", "training", "loss", ".4f"),
        column("to fp32", "training", "to_float32_percent", "+.2f"),
        column("to torch", "training", "to_torch_percent", "+.2f"),
        column("bar", "training", "is_met"),
        column("held out", "held_out", "loss", ".4f"),
        column("to fp32", "held_out", "to_float32_percent", "+.2f"),
        column("bar", "held_out", "is_met"),
    )
    caption = (
        "loss, nats per token, differences in %; bar: within "
        f"{BAR_PERCENT:g}% of cpu-adam's fp32 states"
    )
    return Section("a GPT-2 on real text", rows, columns, caption, "side")


def panels(trials: Sequence[Trial], steps: int) -> list[Panel]:
    smoothed = [{n: _smoothed(side["losses"]) for n, side in trial.items()} for trial in trials]
    means = [(LABELS[name], mean_curve([trial[name] for trial in smoothed])) for name in LABELS]
    differences = [
        (LABELS[name], list(map(percent_over, trial[name], trial[WIDE])))
        for trial in smoothed
        for name in (*NARROW, ORACLE)
    ]
    running = f"running means over {LAST_STEPS}"
    to_wide = f"loss against {LABELS[WIDE]} (%), each seed, {running}"
    return [
        curves("", f"training loss (nats per token), {running}", means, COLORS, steps=steps),
        curves("", to_wide, differences, COLORS, steps=steps, bar_percent=BAR_PERCENT),
    ]


def _smoothed(losses: Sequence[float]) -> list[float]:
    """Return the running means over `LAST_STEPS` steps. The last one is the training loss."""
    return [training_loss(losses[:end]) for end in range(1, len(losses) + 1)]
