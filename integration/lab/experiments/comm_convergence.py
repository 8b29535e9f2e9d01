"""Loss of a small GPT on real text with quantized communication, on 4 CPU ranks.

Four gloo ranks on one machine act as two nodes of two ranks. A contender is a set of configuration
keys. The contender without keys is the reference of the others at the same dtype and seed. It has
the same initial weights and the same text, so that communication alone makes the difference.

The whole grid takes hours on two cores. Each run is written to ``comm_convergence.json`` when it
ends, and ``--resume`` skips the runs in that file.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import zero_core
from benchmarks.harness.job import FOUR_BITS, QGZ, QWZ
from benchmarks.harness.models import Gpt, GptShape
from benchmarks.harness.options import RESULTS, Output, of
from benchmarks.harness.ranks import HERE, Place, RankError, Row, run_ranks
from benchmarks.harness.report import Column, Panel, Section, machine, publish, write_report
from lab.text import curves, mean_curve, percent_over, text_folder, training_config, training_loss
from zero_core.errors import ConfigError
from zero_engine.launch.ranks import sum_over_ranks
from zero_engine.train.data import Corpus

NUM_RANKS, RANKS_PER_NODE = 4, 2
SHAPE = GptShape(layers=2, width=64, heads=4, vocab=512, context=64)
"""137 thousand parameters, so that each shard of the three units has several dozen blocks."""
MICRO_BATCH = 2
HELD_OUT_WINDOWS, HELD_OUT_BATCH = 512, 8
CURVE_POINTS = 50
SECONDS_PER_STEP, START_UP_S = 2.0, 300.0
"""Limits of a run. Slower ranks are killed."""
BAR_PERCENT, BAR_PERCENT_4_BIT = 1.0, 2.0

DTYPES = ("fp32", "bf16", "fp16")
PLAIN = "plain"
_HPZ = {"zero_hpz_partition_size": RANKS_PER_NODE}
CONTENDERS: Mapping[str, Mapping[str, Any]] = {
    PLAIN: {},
    "qwZ": QWZ,
    "hpZ": _HPZ,
    "qgZ": QGZ,
    "all three": {**QWZ, **_HPZ, **QGZ},
    "qgZ, error feedback": {**QGZ, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}},
    "4-bit": {**FOUR_BITS, **_HPZ},
}
"""Keys of ``zero_optimization`` in addition to stage 3."""
COLORS = {name: f"C{number}" for number, name in enumerate(CONTENDERS)}


@dataclass(frozen=True)
class Training:
    """A run with its contender, dtype and seed."""

    contender: str
    """Key of `CONTENDERS`."""
    dtype: str
    """Dtype of the computation, over fp32 master weights: one of `DTYPES`."""
    seed: int
    """Seed of the initial weights and of the order of the text."""
    steps: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.contender, self.dtype, self.seed


def main(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of every run.")] = 1000,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each kind, each with its seed.")] = 3,
    dtypes: Annotated[list[str] | None, of(DTYPES)] = None,
    contenders: Annotated[list[str] | None, of(CONTENDERS)] = None,
    resume: Annotated[bool, typer.Option(help="Go on where the files in --output end.")] = False,
    output: Output = RESULTS,
) -> None:
    """Run the grid, write ``comm_convergence.json`` and ``.png``, print a table.

    Raises:
        ConfigError: there is no file to resume from, or its steps, model or text differ.
    """
    chosen_dtypes = dtypes or DTYPES
    others = [name for name in contenders or CONTENDERS if name != PLAIN]
    jobs = [
        Training(name, dtype, seed, steps)
        for dtype, seed in itertools.product(chosen_dtypes, range(seeds))
        for name in (PLAIN, *others)
    ]
    with text_folder(vocab=SHAPE.vocab, context=SHAPE.context) as folder:
        about = _about(steps, Corpus.open(folder, seed=0))
        found = _resumed(output / "comm_convergence.json", about) if resume else []
        runs = {(run["contender"], run["dtype"], run["seed"]): run for run in found}
        for job in jobs:
            if job.key in runs:
                continue
            try:
                # Rank 0's figures are means over all ranks.
                runs[job.key] = run_ranks(
                    "lab.experiments.comm_convergence:measure",
                    {"job": job, "corpus": str(folder)},
                    NUM_RANKS,
                    nodes=(HERE,) * (NUM_RANKS // RANKS_PER_NODE),
                    limit_s=START_UP_S + SECONDS_PER_STEP * steps,
                )[0]
            except RankError as error:
                print(error.log)
                print(f"{job.dtype} seed {job.seed} {job.contender}: failed: {error}", flush=True)
                continue
            write_report(output, "comm_convergence", _report(about, runs, jobs))
            plain = runs.get((PLAIN, job.dtype, job.seed))
            print(f"{len(runs)}/{len(jobs)}  {_line(runs[job.key], plain)}", flush=True)
    report = _report(about, runs, jobs)
    shown = section(report["summary"], about["text"]["unigram_nats"])
    pictured = Section("", {}, (), panels=panels(report["runs"], steps))
    publish(output, "comm_convergence", report, [shown, pictured], columns=len(chosen_dtypes))


def measure(place: Place, job: Mapping[str, Any], corpus: str) -> Row:
    torch.set_num_threads(1)
    place.join()
    return train(Training(**job), Corpus.open(Path(corpus), seed=0))


def train(job: Training, corpus: Corpus) -> Row:
    """Train a model, then evaluate it. Every rank must call it.

    Args:
        job: the run.
        corpus: the text, whose order the job's seed determines.

    Returns:
        A row. Losses are in nats per token, as means over all ranks: ``held_out``, ``training``
        (mean of the last steps) and ``curve`` (less than twice `CURVE_POINTS` means over steps).
        ``is_finite`` says whether all losses are finite. ``skipped_steps`` counts steps with
        non-finite gradients. In fp16 these are the first steps, until the loss scale is small
        enough. Bytes are those of parameters and gradients that a rank sends per step.
    """
    corpus = replace(corpus, seed=job.seed)
    torch.manual_seed(job.seed)
    shape = replace(SHAPE, vocab=corpus.vocab_size, context=corpus.train.shape[1])
    config = {
        **training_config(job.steps),
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "bf16": {"enabled": job.dtype == "bf16"},
        "fp16": {"enabled": job.dtype == "fp16"},
        "zero_optimization": {"stage": 3, **CONTENDERS[job.contender]},
    }
    engine = zero_core.build(Gpt(shape), config)
    started_at = time.perf_counter()
    here = {"rank": engine.rank, "world_size": engine.world_size}
    losses = []
    for step in range(job.steps):
        loss = engine(corpus.batch(step, **here, micro_batch_size=MICRO_BATCH))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().double())
    sent = [row for row in engine.comm_report() if row.content in ("parameters", "gradients")]
    means = (sum_over_ranks(torch.stack(losses)) / engine.world_size).tolist()
    engine.eval()
    windows = corpus.held_out_batches(HELD_OUT_WINDOWS, **here, micro_batch_size=HELD_OUT_BATCH)
    with torch.no_grad():  # evaluates with the weights that all-gathers return, quantized or not
        of_rank = torch.stack([engine(ids).double() for ids in windows]).mean()
    held_out = float(sum_over_ranks(of_rank)) / engine.world_size
    engine.close()
    size = max(1, len(means) // CURVE_POINTS)
    return {
        "contender": job.contender,
        "dtype": job.dtype,
        "seed": job.seed,
        "held_out": held_out,
        "training": training_loss(means),
        "curve": [
            round(statistics.fmean(means[start : start + size]), 4)
            for start in range(0, len(means), size)
        ],
        "is_finite": all(map(math.isfinite, (*means, held_out))),
        "skipped_steps": engine.skipped_steps,
        "within_node_bytes": sum(row.within_node_bytes for row in sent),
        "between_nodes_bytes": sum(row.between_nodes_bytes for row in sent),
        "seconds": time.perf_counter() - started_at,
    }


Runs = Mapping[tuple[str, str, int], Row]
"""Rows by contender, dtype and seed."""


def _line(run: Row, plain: Row | None) -> str:
    line = f"{run['dtype']} seed {run['seed']} {run['contender']}: held out {run['held_out']:.4f}"
    if plain is not None and plain is not run:
        line += f" ({percent_over(run['held_out'], plain['held_out']):+.2f}%)"
    return f"{line}, {run['seconds']:.0f} s"


def _resumed(path: Path, about: Row) -> list[Row]:
    """Return the runs in a file.

    Raises:
        ConfigError: see `main`.
    """
    if not path.is_file():
        raise ConfigError(f"--resume: {path} is not there: start without --resume")
    found = json.loads(path.read_text(encoding="utf-8"))
    for part in ("settings", "text"):
        if found[part] != about[part]:
            raise ConfigError(
                f"--resume: the {part} of {path} are {found[part]}, asked for are "
                f"{about[part]}: use the same, or start without --resume"
            )
    runs: list[Row] = found["runs"]
    return runs


def _about(steps: int, corpus: Corpus) -> Row:
    """Return settings and text, which ``--resume`` requires to be equal, and the machine.

    Contenders, dtypes and seeds may differ.
    """
    sizes = ("layers", "width", "heads", "context", "vocab")
    return {
        "settings": {
            "steps": steps,
            "ranks": NUM_RANKS,
            "ranks_per_node": RANKS_PER_NODE,
            "micro_batch": MICRO_BATCH,
            "held_out_windows": HELD_OUT_WINDOWS,
            "model": {name: vars(SHAPE)[name] for name in sizes},
            "training": training_config(steps),
        },
        "text": {"sha256": corpus.sha256_of_text, "unigram_nats": round(_unigram_nats(corpus), 4)},
        "machine": machine(),
    }


def _unigram_nats(corpus: Corpus) -> float:
    """Return the held-out loss of predicting each token by its frequency in the training text."""
    counts = Counter(corpus.train.flatten().tolist())
    # Each count is one higher, so that no token has probability 0.
    total = sum(counts.values()) + corpus.vocab_size
    nats = [-math.log((counts[token] + 1) / total) for token in range(corpus.vocab_size)]
    return float(torch.tensor(nats)[corpus.held_out.long()].mean())


def _report(about: Row, runs: Runs, asked: Sequence[Training]) -> Row:
    listed = list(runs.values())
    return {**about, "summary": summarize(listed, asked), "runs": listed}


def bar_percent(contender: str) -> float:
    """Return the largest accepted difference from the unquantized run's held-out loss, in percent.

    The bar is twice as large for 4-bit gradients without error feedback.
    """
    flags = CONTENDERS[contender]
    is_rough = flags.get("zero_quantized_gradients") and "zeropp_loco_param" not in flags
    return BAR_PERCENT_4_BIT if is_rough else BAR_PERCENT


def _pairs(runs: Sequence[Row], dtype: str, name: str) -> list[tuple[Row, Row]]:
    """Return a contender's runs, each paired with the unquantized run of the same seed."""
    of_dtype = [run for run in runs if run["dtype"] == dtype]
    plain = {run["seed"]: run for run in of_dtype if run["contender"] == PLAIN}
    mine = [run for run in of_dtype if run["contender"] == name]
    return [(run, plain[run["seed"]]) for run in mine if run["seed"] in plain]


def summarize(runs: Sequence[Row], asked: Sequence[Training]) -> list[Row]:
    """Return a row per dtype and contender. A bar is met if every run of the grid meets it."""
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


def _figures(name: str, pairs: Sequence[tuple[Row, Row]]) -> Row:
    runs = [run for run, _ in pairs]
    percents = [percent_over(run["held_out"], plain["held_out"]) for run, plain in pairs]
    run, plain = pairs[0]

    def less_sent(kind: str) -> float:
        """Return the unquantized run's bytes over this run's, for one kind of link."""
        return float(plain[kind] / run[kind]) if run[kind] else math.inf

    return {
        "held_out": statistics.median(run["held_out"] for run in runs),
        "training": statistics.median(run["training"] for run in runs),
        "to_plain_percent": percents,
        "median_percent": statistics.median(percents),
        "worst_percent": max(percents, key=abs),
        "bar_percent": bar_percent(name),
        "is_finite": all(run["is_finite"] for run in runs),
        "skipped_steps": [run["skipped_steps"] for run in runs],
        "within_node_ratio": less_sent("within_node_bytes"),
        "between_nodes_ratio": less_sent("between_nodes_bytes"),
    }


def section(summary: Sequence[Row], unigram_nats: float) -> Section:

    def verdict(row: Row) -> str:
        if not row["seeds"]:
            return "missing"
        if row["contender"] == PLAIN:
            return ""
        if not row["is_finite"]:
            return "NaN"
        if abs(row["worst_percent"]) > row["bar_percent"]:
            return "missed"
        return f"{len(row['missing_seeds'])} missing" if row["missing_seeds"] else "met"

    def less_sent(row: Row) -> str | None:
        ratios = [row.get(f"{kind}_ratio") for kind in ("within_node", "between_nodes")]
        return None if None in ratios else ", ".join(f"{ratio:.2f}" for ratio in ratios)

    columns = (
        Column("held out", "held_out", ".4f"),
        Column("training", "training", ".4f"),
        Column("to plain", "median_percent", "+.2f"),
        Column("worst", "worst_percent", "+.2f"),
        Column("bar", "bar_percent", "g"),
        Column("", verdict),
        Column("less sent", less_sent),
        Column("skipped", lambda row: "/".join(map(str, row.get("skipped_steps", ())))),
    )
    return Section(
        "a small GPT on real text, quantized communication",
        {f"{row['dtype']} {row['contender']}": row for row in summary},
        columns,
        "loss in nats per token, medians over seeds (guessing by frequency: "
        f"{unigram_nats:.2f}), differences in %; less sent: how many times, within a node and "
        "between nodes",
        "contender",
    )


def panels(runs: Sequence[Row], steps: int) -> list[Panel]:
    """Return panels of the training loss and of its difference from the unquantized run's."""
    losses, differences = [], []
    for dtype in DTYPES:
        own: list[tuple[str, list[float]]] = []
        to_plain: list[tuple[str, list[float]]] = []
        for name in CONTENDERS:
            if pairs := _pairs(runs, dtype, name):
                mine, plain = (
                    mean_curve([run["curve"] for run in of]) for of in zip(*pairs, strict=True)
                )
                own.append((name, mine))
                to_plain.append((name, list(map(percent_over, mine, plain))))
        if own:
            label = "training loss (nats per token), mean over seeds"
            losses.append(curves(dtype, label, own, COLORS, steps=steps))
            label = "to unquantized (%), mean over seeds"
            panel = curves(dtype, label, to_plain[1:], COLORS, steps=steps, bar_percent=BAR_PERCENT)
            differences.append(panel)
    return losses + differences
