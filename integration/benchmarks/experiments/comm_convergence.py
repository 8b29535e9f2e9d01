"""Loss of a small GPT on real text with quantized communication, on 4 CPU ranks.

Four gloo ranks on one machine act as two nodes of two. A **contender** is a set of flags; the one
without any is the reference of the others at the same dtype and seed: it starts from the same
weights and sees the same text, so their distance comes from the communication alone.

The whole grid takes hours on two cores. Each run is therefore written to ``comm_convergence.json``
when it ends, and ``--resume`` does not repeat those that are in the file.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from benchmarks.experiments import comm_training
from benchmarks.experiments.comm_training import CONTENDERS, DTYPES, PLAIN, Training
from benchmarks.harness.options import RESULTS, Output, choose
from benchmarks.harness.ranks import CPU_ALONE, RankError, Row, run_ranks, write_json
from benchmarks.harness.report import Axes, Column, empty_table, machine, make_console, save_panels
from zero_core.errors import ConfigError
from zero_engine.train.data import Corpus, prepare_corpus, read_text

SECONDS_PER_STEP, START_UP_S = 2.0, 300.0
"""Ranks that take longer are ended."""
BAR_PERCENT, BAR_PERCENT_4_BIT = 1.0, 2.0


def main(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of every run.")] = 1000,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each kind, each with its seed.")] = 3,
    dtypes: Annotated[list[str] | None, typer.Option(help=f"Of: {', '.join(DTYPES)}.")] = None,
    contenders: Annotated[
        list[str] | None, typer.Option(help=f"Of: {', '.join(CONTENDERS)}.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on where the files in --output end.")] = False,
    output: Output = RESULTS,
) -> None:
    """Run the grid, print a table, write ``comm_convergence.json`` and ``.png``.

    Raises:
        ConfigError: there is nothing to resume, or it is of other steps, another model or text.
    """
    chosen_dtypes = choose(dtypes, DTYPES, "dtype", "--dtypes")
    others = [n for n in choose(contenders, CONTENDERS, "contender", "--contenders") if n != PLAIN]
    jobs = [
        Training(name, dtype, seed, steps)
        for dtype, seed in itertools.product(chosen_dtypes, range(seeds))
        for name in (PLAIN, *others)
    ]
    console = make_console()
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        shape = {"vocab_size": comm_training.VOCAB, "context": comm_training.CONTEXT}
        prepare_corpus(read_text(None), Path(scratch), **shape)
        corpus = Corpus.open(Path(scratch), seed=0)
        record = Record(output / "comm_convergence.json", _about(steps, corpus), jobs)
        if resume:
            record.resume()
        for job in jobs:
            if record.find(job) is not None:
                continue
            try:
                run = _train(job, scratch)
            except RankError as error:
                console.print(error.log, style="dim")
                console.print(f"{job.dtype} seed {job.seed} {job.contender}: failed: {error}")
                continue
            record.add(run)
            console.print(f"{len(record.runs)}/{len(jobs)}  {_line(run, record.plain_of(run))}")
    record.write()
    if record.runs:
        summary = summarize(record.runs, jobs)
        console.print(table(summary, record.about["text"]["unigram_nats"]))
        plot(record.runs, record.path.with_suffix(".png"), steps=steps)
    console.print(f"written to {output}")


def _train(job: Training, corpus: str) -> Row:
    """Run a job in fresh processes. Return rank 0's figures, all means over ranks."""
    return run_ranks(
        "benchmarks.experiments.comm_training:measure",
        {"job": job, "corpus": corpus},
        comm_training.NUM_RANKS,
        CPU_ALONE,
        limit_s=START_UP_S + SECONDS_PER_STEP * job.steps,
    )[0]


def _line(run: Row, plain: Row | None) -> str:
    line = f"{run['dtype']} seed {run['seed']} {run['contender']}: held out {run['held_out']:.4f}"
    if plain is not None and plain is not run:
        line += f" ({_percent(run['held_out'], plain['held_out']):+.2f}%)"
    return f"{line}, {run['seconds']:.0f} s"


class Record:
    """The result file: the grid, and every run so far."""

    def __init__(self, path: Path, about: Row, asked: Sequence[Training]) -> None:
        self.path = path
        self.about = about
        self.asked = asked
        self.runs: list[Row] = []

    def resume(self) -> None:
        """Take the runs of the file.

        Raises:
            ConfigError: see `main`.
        """
        if not self.path.is_file():
            raise ConfigError(f"--resume: {self.path} is not there: start without --resume")
        found = json.loads(self.path.read_text(encoding="utf-8"))
        for part in ("settings", "text"):
            if found[part] != self.about[part]:
                raise ConfigError(
                    f"--resume: the {part} of {self.path} are {found[part]}, asked for are "
                    f"{self.about[part]}: use the same, or start without --resume"
                )
        self.runs = found["runs"]

    def find(self, job: Training) -> Row | None:
        """Return the run of ``job``."""
        return self._find(job.contender, job.dtype, job.seed)

    def plain_of(self, run: Row) -> Row | None:
        """Return the unquantized run of the same dtype and seed."""
        return self._find(PLAIN, run["dtype"], run["seed"])

    def _find(self, *key: object) -> Row | None:
        names = ("contender", "dtype", "seed")
        return next((run for run in self.runs if tuple(run[n] for n in names) == key), None)

    def add(self, run: Row) -> None:
        """Keep ``run``, in the file as well."""
        self.runs.append(run)
        self.write()

    def write(self) -> None:
        summary = summarize(self.runs, self.asked)
        write_json(self.path, {**self.about, "summary": summary, "runs": self.runs})


def _about(steps: int, corpus: Corpus) -> Row:
    """Return what decides the figures, but for the grid: a resumed run may have another one."""
    sizes = ("layers", "width", "heads", "context", "vocab")
    return {
        "settings": {
            "steps": steps,
            "ranks": comm_training.NUM_RANKS,
            "ranks_per_node": comm_training.RANKS_PER_NODE,
            "micro_batch": comm_training.MICRO_BATCH,
            "held_out_windows": comm_training.HELD_OUT_WINDOWS,
            "model": {name: getattr(comm_training, name.upper()) for name in sizes},
            "training": comm_training.training_config(steps),
        },
        "text": {
            "sha256": corpus.sha256_of_text,
            "unigram_nats": round(_unigram_nats(corpus), 4),
        },
        "machine": machine(),
    }


def _unigram_nats(corpus: Corpus) -> float:
    """Return the held-out loss of guessing each token by its frequency in the training text."""
    counts = Counter(corpus.train.flatten().tolist())
    total = sum(counts.values()) + corpus.vocab_size  # one more of each: none has no chance
    nats = [-math.log((counts[token] + 1) / total) for token in range(corpus.vocab_size)]
    return float(torch.tensor(nats)[corpus.held_out.long()].mean())


def bar_percent(contender: str) -> float:
    """Return the bar of its held-out loss: its distance to the unquantized one's, in percent.

    Twice as far with gradients of 4 bits and no error feedback.
    """
    flags = CONTENDERS[contender]
    is_rough = flags.get("zero_quantized_gradients") and "zeropp_loco_param" not in flags
    return BAR_PERCENT_4_BIT if is_rough else BAR_PERCENT


Pairs = Sequence[tuple[Row, Row]]
"""Runs of one contender and dtype, each with the unquantized run of its seed."""


def _pairs(runs: Sequence[Row], dtype: str, name: str) -> Pairs:
    """Return the pairs. A run whose unquantized run failed has no reference."""
    plain = {run["seed"]: run for run in runs if _is_of(run, dtype, PLAIN)}
    mine = [run for run in runs if _is_of(run, dtype, name) and run["seed"] in plain]
    return [(run, plain[run["seed"]]) for run in mine]


def _is_of(run: Row, dtype: str, name: str) -> bool:
    return bool(run["dtype"] == dtype and run["contender"] == name)


def summarize(runs: Sequence[Row], asked: Sequence[Training]) -> list[Row]:
    """Return a row per dtype and contender. A bar is met if every run of the grid met it."""
    rows = []
    for dtype, name in itertools.product(DTYPES, CONTENDERS):
        pairs = _pairs(runs, dtype, name)
        seeds = [run["seed"] for run, _ in pairs]
        wanted = {job.seed for job in asked if (job.contender, job.dtype) == (name, dtype)}
        missing = sorted(wanted - set(seeds))
        if not pairs and not wanted:
            continue
        figures = _figures(name, pairs) if pairs else {}
        is_near = all(abs(p) <= bar_percent(name) for p in figures.get("to_plain_percent", ()))
        is_met = is_near and not missing and all(run["is_finite"] for run, _ in pairs)
        about = {"dtype": dtype, "contender": name, "seeds": seeds, "missing_seeds": missing}
        rows.append({**about, "is_met": is_met, **figures})
    return rows


def _figures(name: str, pairs: Pairs) -> Row:
    runs = [run for run, _ in pairs]
    percents = [_percent(run["held_out"], plain["held_out"]) for run, plain in pairs]
    return {
        "held_out": statistics.median(run["held_out"] for run in runs),
        "training": statistics.median(run["training"] for run in runs),
        "to_plain_percent": percents,
        "median_percent": statistics.median(percents),
        "worst_percent": max(percents, key=abs),
        "bar_percent": bar_percent(name),
        "is_finite": all(run["is_finite"] for run in runs),
        "skipped_steps": [run["skipped_steps"] for run in runs],
        "within_node_ratio": _ratio(*pairs[0], "within_node_bytes"),
        "between_nodes_ratio": _ratio(*pairs[0], "between_nodes_bytes"),
    }


def _percent(value: float, reference: float) -> float:
    """Return how much higher ``value`` is, in percent."""
    return 100.0 * (value / reference - 1.0)


def _ratio(run: Row, plain: Row, kind: str) -> float:
    """Return how many times as much the unquantized run sends over one kind of link."""
    return float(plain[kind] / run[kind]) if run[kind] else math.inf


COLUMNS = (
    Column("contender", "contender"),
    Column("held out", "held_out", ".4f"),
    Column("training", "training", ".4f"),
    Column("to plain", "median_percent", "+.2f"),
    Column("worst", "worst_percent", "+.2f"),
    Column("bar", "bar_percent", "g"),
    Column("", lambda row: _verdict(row)),
    Column("less sent", lambda r: f"{r['within_node_ratio']:.2f}, {r['between_nodes_ratio']:.2f}"),
    Column("skipped", lambda row: "/".join(map(str, row["skipped_steps"]))),
)


def table(summary: Sequence[Row], unigram_nats: float) -> Table:
    """Return a line per row of `summarize`."""
    found = empty_table(
        ["dtype", *(column.heading for column in COLUMNS)],
        title="a small GPT on real text, quantized communication",
        caption="loss in nats per token, medians over seeds (guessing by frequency: "
        f"{unigram_nats:.2f}), differences in %; less sent: how many times, within a node and "
        "between nodes",
        num_names=2,
    )
    for row in summary:
        if row["seeds"]:
            found.add_row(row["dtype"], *(column.cell(row) for column in COLUMNS))
        else:
            found.add_row(row["dtype"], row["contender"], *[""] * 5, "missing")
    return found


def _verdict(row: Mapping[str, Any]) -> str:
    if row["contender"] == PLAIN:
        return ""
    if not row["is_finite"]:
        return "NaN"
    if abs(row["worst_percent"]) > row["bar_percent"]:
        return "missed"
    return f"{len(row['missing_seeds'])} missing" if row["missing_seeds"] else "met"


def plot(runs: Sequence[Row], path: Path, *, steps: int) -> None:
    """Draw the training loss, means over seeds, and below it the distance to the unquantized."""
    dtypes = [dtype for dtype in DTYPES if any(_is_of(run, dtype, PLAIN) for run in runs)]

    def draw(axes: Axes, dtype: str, is_difference: bool) -> None:
        for number, name in enumerate(CONTENDERS):
            pairs = _pairs(runs, dtype, name)
            if not pairs or (is_difference and name == PLAIN):
                continue
            values = _mean([run["curve"] for run, _ in pairs])
            at = [steps * (place + 1) / len(values) for place in range(len(values))]
            if is_difference:
                plain = _mean([plain["curve"] for _, plain in pairs])
                values = [_percent(*pair) for pair in zip(values, plain, strict=True)]
            axes.plot(at, values, label=name, color=f"C{number}", linewidth=1)
        if is_difference:
            axes.axhspan(-BAR_PERCENT, BAR_PERCENT, color="tab:gray", alpha=0.15)
        about = "to unquantized (%)" if is_difference else "training loss (nats per token)"
        axes.set_ylabel(f"{about}, mean over seeds")
        axes.set_xlabel("step")
        axes.grid(visible=True, alpha=0.3)
        if axes.lines:
            axes.legend()

    panels = [
        (dtype, 12, lambda axes, d=dtype, i=is_difference: draw(axes, d, i))
        for is_difference in (False, True)
        for dtype in dtypes
    ]
    save_panels(path, panels, columns=len(dtypes) or 1)


def _mean(curves: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(values) for values in zip(*curves, strict=True)]
