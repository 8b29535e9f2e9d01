"""What quantized communication costs in loss: a small GPT on real text, every flag and dtype.

Four gloo ranks on one machine act as two nodes of two. A **contender** is a set of flags; the one
without any is what the others are held against, at the same dtype and seed: it starts from the same
weights and sees the same text, so what lies between the two comes from the communication alone.

The whole grid takes hours on two cores. Each run is therefore written to ``comm_convergence.json``
when it ends, and with ``--resume`` those that are there are not repeated.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from zero_core.errors import ConfigError
from zero_engine.bench import comm_training
from zero_engine.bench.comm_convergence_report import plot, summarize, table
from zero_engine.bench.comm_training import PLAIN, Job, Run
from zero_engine.bench.processes import CPU_ALONE, RankError, run_ranks
from zero_engine.data import Corpus, prepare_corpus, read_text
from zero_engine.machine import processor_name

__all__ = ["Settings", "compare"]

SECONDS_PER_STEP = 2.0
"""Ranks that take longer than this, and `START_UP_S`, are ended."""
START_UP_S = 300.0
POLL_S = 0.5
PAGE_WIDTH = 110


@dataclass(frozen=True)
class Settings:
    """The grid."""

    steps: int
    seeds: Sequence[int]
    dtypes: Sequence[str]
    contenders: Sequence[str]

    def groups(self) -> Iterator[list[Job]]:
        """All jobs, in lists that one start of the processes runs."""
        names = [PLAIN, *(name for name in self.contenders if name != PLAIN)]
        for dtype, seed in itertools.product(self.dtypes, self.seeds):
            yield [Job(name, dtype, seed, self.steps) for name in names]


def compare(settings: Settings, *, output: Path, should_resume: bool) -> None:
    """Run the grid, print a table, write ``comm_convergence.json`` and ``.png``.

    Raises:
        ConfigError: there is nothing to resume, or it is of other steps, another model or text.
    """
    console = Console(width=PAGE_WIDTH)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        corpus = _prepare(Path(scratch, "corpus"))
        jobs = [job for group in settings.groups() for job in group]
        record = _Record(output / "comm_convergence.json", _about(settings, corpus), jobs)
        if should_resume:
            record.resume()
        progress = _Progress(console, len(jobs), done=sum(record.has(job) for job in jobs))

        def take(run: Run) -> None:
            record.add(run)
            progress.say(run, record.plain_of(run))

        for group in settings.groups():
            _train([job for job in group if not record.has(job)], Path(scratch), take, console)
    record.write()
    if record.runs:
        console.print(table(record.runs, jobs, record.about["text"]["unigram_nats"]))
        plot(record.runs, record.path.with_suffix(".png"), steps=settings.steps)
    console.print(f"written to {output}", highlight=False)


def _prepare(folder: Path) -> Corpus:
    shape = {"vocab_size": comm_training.VOCAB, "context": comm_training.CONTEXT}
    prepare_corpus(read_text(None), folder, **shape)
    return Corpus.open(folder, seed=0)


def _train(
    jobs: Sequence[Job], scratch: Path, take: Callable[[Run], None], console: Console
) -> None:
    """Run ``jobs``; one that fails is said and left out, and those after it are run."""
    left = list(jobs)

    def take_first(run: Run) -> None:
        take(run)
        left.pop(0)

    while left:
        failure = _start(list(left), scratch, take_first)
        if failure is not None:
            job = left.pop(0)
            console.print(failure.log, style="dim", highlight=False, markup=False)
            name = f"{job.dtype} seed {job.seed} {job.contender}"
            console.print(f"{name}: failed: {failure}", highlight=False, markup=False)


def _start(jobs: Sequence[Job], scratch: Path, take: Callable[[Run], object]) -> RankError | None:
    """Start the ranks once for all ``jobs``, and ``take`` each run as soon as it is done."""
    runs = scratch / "runs.jsonl"
    runs.write_text("", encoding="utf-8")
    arguments = [json.dumps([asdict(job) for job in jobs]), str(scratch / "corpus"), str(runs)]
    limit_s = START_UP_S + SECONDS_PER_STEP * sum(job.steps for job in jobs)
    num_taken = 0
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(
            run_ranks,
            comm_training.__name__,
            arguments,
            comm_training.NUM_RANKS,
            CPU_ALONE,
            limit_s=limit_s,
        )
        is_done = False
        while not is_done:
            time.sleep(POLL_S)
            is_done = ended.done()  # before the file is read: nothing comes after that
            lines = runs.read_text(encoding="utf-8").splitlines(keepends=True)
            for line in lines[num_taken:]:
                if line.endswith("\n"):
                    take(Run(**json.loads(line)))
                    num_taken += 1
    error = ended.exception()
    if error is None or isinstance(error, RankError):
        return error
    raise error


class _Record:
    """The result file: what was asked, and every run so far."""

    def __init__(self, path: Path, about: dict[str, Any], asked: Sequence[Job]) -> None:
        self.path = path
        self.about = about
        self.asked = asked
        self.runs: list[Run] = []

    def resume(self) -> None:
        """Take over the runs of the file.

        Raises:
            ConfigError: see `compare`.
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
        self.runs = [Run(**run) for run in found["runs"]]

    def has(self, job: Job) -> bool:
        """Whether the run of ``job`` is there."""
        return any(_key(run) == _key(job) for run in self.runs)

    def plain_of(self, run: Run) -> Run | None:
        """The unquantized run of the same dtype and seed."""
        key = (PLAIN, run.dtype, run.seed)
        return next((other for other in self.runs if _key(other) == key), None)

    def add(self, run: Run) -> None:
        """Keep ``run``, in the file as well."""
        self.runs.append(run)
        self.write()

    def write(self) -> None:
        """Replace the file at once: a reader finds the old one or the new one."""
        rows = ",\n  ".join(json.dumps(asdict(run)) for run in self.runs)
        about = json.dumps({**self.about, "summary": summarize(self.runs, self.asked)}, indent=2)
        aside = self.path.with_suffix(".tmp")
        aside.write_text(f'{about[:-2]},\n  "runs": [\n  {rows}\n  ]\n}}\n', encoding="utf-8")
        os.replace(aside, self.path)


def _key(job: Job | Run) -> tuple[str, str, int]:
    return job.contender, job.dtype, job.seed


def _about(settings: Settings, corpus: Corpus) -> dict[str, Any]:
    """What decides the figures, but for the grid: a resumed run may have another one."""
    return {
        "settings": {
            "steps": settings.steps,
            "ranks": comm_training.NUM_RANKS,
            "ranks_per_node": comm_training.RANKS_PER_NODE,
            "micro_batch": comm_training.MICRO_BATCH,
            "held_out_windows": comm_training.HELD_OUT_WINDOWS,
            "model": {
                name: getattr(comm_training, name.upper())
                for name in ("layers", "width", "heads", "context", "vocab")
            },
            "training": comm_training.training_config(settings.steps),
        },
        "text": {
            "sha256": corpus.sha256_of_text,
            "unigram_nats": round(_unigram_nats(corpus), 4),
        },
        "machine": {
            "processor": processor_name(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
        },
    }


def _unigram_nats(corpus: Corpus) -> float:
    """Held-out loss of guessing each token by how often it is in the text that is trained on."""
    counts = Counter(corpus.train.flatten().tolist())
    total = sum(counts.values()) + corpus.vocab_size  # one more of each: none has no chance
    nats = [-math.log((counts[token] + 1) / total) for token in range(corpus.vocab_size)]
    return float(torch.tensor(nats)[corpus.held_out.long()].mean())


class _Progress:
    """A line for every run that ends."""

    def __init__(self, console: Console, num_jobs: int, *, done: int) -> None:
        self._console = console
        self._num_jobs = num_jobs
        self._done = done

    def say(self, run: Run, plain: Run | None) -> None:
        """Tell what came of ``run``, beside the unquantized one."""
        self._done += 1
        line = f"{self._done}/{self._num_jobs}  {run.dtype} seed {run.seed} {run.contender}:"
        line += f" held out {run.held_out:.4f}"
        if plain is not None and plain is not run:
            line += f" ({100.0 * (run.held_out / plain.held_out - 1.0):+.2f}%)"
        line += f", {run.seconds:.0f} s"
        self._console.print(line, highlight=False)
