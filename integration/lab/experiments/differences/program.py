"""Lossless differences of weights compared with other codecs, and their bytes over whole runs.

The first tables have the figures of `lab.experiments.differences.codecs`. The last ones have those
of `lab.experiments.differences.runs`: "of whole" is a contender's bytes over those of whole weights
in a run, "worst" the largest such ratio of a step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.harness.options import RESULTS, Output
from benchmarks.harness.ranks import Row
from benchmarks.harness.report import Axes, Column, Panel, Section, judged, machine, publish
from lab.experiments.differences import codecs, runs
from lab.text import text_folder
from zero_engine.train.data import Corpus

GIGA = 1e9
BARS: Mapping[str, float] = {"3e-04": 0.35, "2e-05": 0.15, "1e-05": 0.125}
"""Largest share of the whole weights' bytes, by learning rate."""
SPEED_BAR = 5e9
WORST_BAR = 1.02


def main(
    steps: Annotated[int, typer.Option(min=20, help="Steps of the run from nothing.")] = 400,
    fine_steps: Annotated[int, typer.Option(min=2, help="Steps of each fine-tuning.")] = 100,
    output: Output = RESULTS,
) -> None:
    """Measure, write ``differences.json`` and ``.png``, print tables."""
    torch.set_num_threads(1)
    shape = codecs.SHAPE
    with (
        text_folder(vocab=shape.vocab, context=shape.context) as corpus,
        tempfile.TemporaryDirectory() as scratch,
    ):
        recorded = {}
        for step in codecs.record(Corpus.open(corpus, seed=0), steps):
            recorded[step.name] = codecs.compare(step)
            print(step.name, flush=True)
        base = str(Path(scratch, "model.safetensors"))
        asked = [
            runs.Run(name, codecs.FROM_NOTHING, steps, saved=base if name == runs.WHOLE else None)
            for name in runs.CONTENDERS
        ]
        for lr in codecs.FINE_TUNING:
            asked += [runs.Run(name, lr, fine_steps, base=base) for name in runs.CONTENDERS]
        found = []
        for run in asked:
            found.append({"contender": run.contender, "lr": run.lr, **runs.start(run, corpus)})
            print(f"{run.contender} at {run.lr:g}: loss {found[-1]['training']:.4f}", flush=True)
    settings = {"steps": steps, "fine_steps": fine_steps, "shape": vars(shape)}
    report = {"settings": settings, "machine": machine(), "recorded": recorded, "runs": found}
    sections = [codec_section(recorded), *map(run_section, _by_rate(found).values())]
    publish(output, "differences", report, sections, columns=1)


def codec_section(recorded: Mapping[str, Row]) -> Section:
    """Return a table with a line per recorded step and codec."""
    rows = {
        f"{step}: {name}": {
            "entropy": row["entropy"],
            "changed": row["changed"],
            "is_ours": name == codecs.OURS,
            **figures,
        }
        for step, row in recorded.items()
        for name, figures in row["codecs"].items()
    }

    def speed(row: Row, which: str) -> str | None:
        is_met = row[which] >= SPEED_BAR if row["is_ours"] else None
        return judged(row[which] / GIGA, ".1f", is_met)

    columns = (
        Column("changed", "changed", ".1%"),
        Column("entropy", "entropy", ".2f"),
        Column("bits", "bits", ".2f"),
        Column("encode", lambda row: speed(row, "encode")),
        Column("decode", lambda row: speed(row, "decode")),
    )
    caption = "bits per weight of 16; GB of weights per second, one thread"
    return Section("recorded steps", rows, columns, caption, "step: codec", [_plot(recorded)])


def _plot(recorded: Mapping[str, Row]) -> Panel:
    def draw(axes: Axes) -> None:
        names = next(iter(recorded.values()))["codecs"]
        for name in names:
            figures = [row["codecs"][name] for row in recorded.values()]
            slower = [min(f["encode"], f["decode"]) / GIGA for f in figures]
            axes.scatter([f["bits"] for f in figures], slower, label=name, s=14)
        axes.axhline(SPEED_BAR / GIGA, color="tab:gray", linewidth=1)
        axes.set_yscale("log")
        axes.set_xlabel("bits per weight")
        axes.set_ylabel("GB/s, slower direction")
        axes.legend()

    return "recorded steps: bits and speed of one thread", 13, draw


def _by_rate(found: Sequence[Row]) -> dict[float, list[Row]]:
    rates: dict[float, list[Row]] = {}
    for row in found:
        rates.setdefault(row["lr"], []).append(row)
    return rates


def run_section(found: Sequence[Row]) -> Section:
    """Return a table with a line per contender at one learning rate."""
    lr = found[0]["lr"]
    (whole,) = [row for row in found if row["contender"] == runs.WHOLE]
    bar = BARS.get(f"{lr:.0e}")

    def shares(row: Row) -> list[float]:
        pairs = zip(row["sent_bytes"], whole["sent_bytes"], strict=True)
        return [sent / all_of_it for sent, all_of_it in pairs]

    rows = {}
    for row in found:
        of_whole = shares(row)
        rows[row["contender"]] = {
            "of_whole": sum(row["sent_bytes"]) / sum(whole["sent_bytes"]),
            "worst": max(of_whole),
            "training": row["training"],
            "loss_bits": row["losses"] == whole["losses"],
            "is_ours": row["contender"] == runs.LOSSLESS,
        }

    def share(row: Row) -> str | None:
        is_met = row["of_whole"] <= bar if bar is not None and row["is_ours"] else None
        return judged(row["of_whole"], ".3f", is_met)

    def worst(row: Row) -> str | None:
        return judged(row["worst"], ".3f", row["worst"] <= WORST_BAR if row["is_ours"] else None)

    def losses(row: Row) -> str:
        return "same bits" if row["loss_bits"] else "differ"

    def draw(axes: Axes) -> None:
        for row in found:
            axes.plot(shares(row), label=row["contender"], linewidth=1)
        axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_ylabel("bytes of whole weights")
        axes.legend()

    title = f"bytes of parameters between nodes, learning rate {lr:g}"
    columns = (
        Column("of whole", share),
        Column("worst", worst),
        Column("loss", "training", ".5f"),
        Column("losses", losses),
    )
    caption = f"bar: {bar} of whole" if bar else None
    return Section(title, rows, columns, caption, "contender", [(title, 11, draw)])
