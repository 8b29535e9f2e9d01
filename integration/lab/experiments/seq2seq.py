"""A T5 under a memory cap: the largest micro-batch, and the times to train and evaluate with it.

This experiment repeats the table of Hugging Face's post "Fit More and Train Faster With ZeRO" on
this machine's cores, in proportion. The post trains t5-large on two cards of 24 GiB, with 2000
samples for training and 500 for evaluation by a beam search of 4.

[Note: scale]
model    t5-large's proportions: `benchmarks.harness.models.T5`, 16 heads, and a token per 8
         elements of width (128 for 1024), so that activations are to parameters as in t5-large
cap      as many bytes per parameter as 24 GiB are for t5-large's 737,668,096 parameters
samples  a twentieth of the post's for training, a tenth for evaluation
dtype    fp32 on all sides, because processors without bf16 instructions are many times slower in
         bf16

[Note: cap]
A rank's memory is the kernel's peak of its resident memory, minus the value before the model was
made and minus other ranks' shards (`benchmarks.harness.memory`). After the build, each step and
each batch of beams, all ranks learn the largest value and stop if it exceeds the cap. Limits of the
kernel would measure something else: RLIMIT_DATA ignores shared memory and counts untouched stacks,
RLIMIT_RSS has no effect, and a cgroup needs root and counts imports. glibc returns freed tensors to
the system, so that no side's peak includes fragments of earlier ones.

[Note: search]
Every try starts fresh processes, which take two steps. The search ends when a micro-batch fits and
the next larger one does not. An error ends a contender's search, and its row has the reason.

On a CPU the host is the device, so "offloaded" states count towards the same cap.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor
from torch.distributed.fsdp import register_fsdp_forward_method

from benchmarks.experiments.engine import Contenders
from benchmarks.experiments.memory import RETURN_FREED
from benchmarks.harness import options
from benchmarks.harness.forked_python import start_server
from benchmarks.harness.job import Job
from benchmarks.harness.memory import GIB, MIB, peak_bytes, resident_bytes, restart_peak
from benchmarks.harness.models import GptShape
from benchmarks.harness.options import RESULTS, Output, of
from benchmarks.harness.ranks import CPU_ALONE, Place, Row, Runner, own_environment
from benchmarks.harness.report import Column, Rows, Section, bars, green, machine, publish
from benchmarks.harness.rounds import has_figures, measured, missing, quotient, take_turns
from benchmarks.harness.sides import NEEDS, SIDES

T5_LARGE_NUMEL, CARD_BYTES = 737_668_096, 24 * GIB
BEAMS, HEADS, VOCAB_PER_WIDTH = 4, 16, 32128 / 1024
FIRST_TRIES = (2, 10)
TRY_STEPS = 1
"""Steps of a try after one warm-up step, which allocates states and pools."""
IMPORTED = ("transformers.models.t5.modeling_t5", "transformers.generation.utils")
_HOST = {"offload_optimizer": {"device": "cpu", "ratio": 1.0}}
_DEEPSPEED_HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
CONTENDERS: Contenders = {
    "plain": ("torch", 0, {}),
    "ddp": ("ddp", 0, {}),
    "fsdp2": ("fsdp2", 3, {}),
    **{f"deepspeed-{stage}": ("deepspeed", stage, {}) for stage in (2, 3)},
    "deepspeed-2-offload": ("deepspeed", 2, _DEEPSPEED_HOST),
    **{f"zero-{stage}": ("zero", stage, {}) for stage in (2, 3)},
    **{f"zero-{stage}-offload": ("zero", stage, _HOST) for stage in (2, 3)},
}
BASELINE = "ddp"
"""The contender that the others are compared with, as in the post."""
ALONE = "plain"
"""The contender that runs in a single process."""
POST: Rows = {
    "baseline": {"batch": 16, "train_s": 30.9458, "eval_s": 56.3310},
    "fp16": {"batch": 20, "train_s": 21.4943, "eval_s": 53.4675},
    "sharded_ddp": {"batch": 30, "train_s": 25.9085, "eval_s": 47.5589},
    "sharded_ddp, fp16": {"batch": 30, "train_s": 17.3838, "eval_s": 45.6593},
    "deepspeed": {"batch": 40, "train_s": 10.4007, "eval_s": 34.9289},
    "deepspeed, cpu offload": {"batch": 50, "train_s": 20.9706, "eval_s": 32.1409},
}
"""The post's figures. Only their ratios to the baseline can be compared with this experiment's."""
Attempt = Callable[[int], Row]
"""Function that tries a micro-batch and returns its row."""


def main(
    rounds: options.Rounds = 2,
    threads: Annotated[int, typer.Option(min=1, help="Threads per rank.")] = 1,
    dtype: Annotated[str, typer.Option(help="fp32, or bf16 over fp32 weights.")] = "fp32",
    layers: Annotated[int, typer.Option(min=1, help="Of the encoder, and of the decoder.")] = 8,
    width: Annotated[int, typer.Option(min=HEADS, help="A multiple of 16.")] = 256,
    train_samples: Annotated[int, typer.Option(min=2, help="Trained in a round.")] = 100,
    eval_samples: Annotated[int, typer.Option(min=2, help="Evaluated in a round.")] = 50,
    most: Annotated[int, typer.Option(min=1, help="Largest micro-batch that is tried.")] = 256,
    only: Annotated[list[str] | None, of(CONTENDERS)] = None,
    output: Output = RESULTS,
) -> None:
    """Search, measure, write ``seq2seq.json`` and ``seq2seq.png``, and print two tables.

    All contenders are searched before the first one is measured.
    """
    if width % HEADS:
        raise typer.BadParameter(f"{width} is no multiple of {HEADS}", param_hint="--width")
    if train_samples % 2 or eval_samples % 2:
        raise typer.BadParameter("two ranks have half of the samples each: give even numbers")
    vocab = round(VOCAB_PER_WIDTH * width)
    shape = GptShape(layers, width, heads=HEADS, vocab=vocab, context=max(2, width // 8))
    jobs = {name: job_of(name, shape, threads, dtype) for name in only or CONTENDERS}
    numel = sum(param.numel() for param in next(iter(jobs.values())).meta_model().parameters())
    cap = numel * CARD_BYTES // T5_LARGE_NUMEL
    runner = Runner(python=_python(jobs.values()))
    samples = {"train": train_samples, "evaluate": eval_samples}
    print(f"{numel / 1e6:.1f} M parameters, cap {cap / MIB:.0f} MiB per rank", flush=True)
    started_at = time.perf_counter()
    searched = {name: search(job, cap, most, runner) for name, job in jobs.items()}
    search_s = time.perf_counter() - started_at
    found = timed(jobs, searched, cap, samples, rounds, runner)
    report = {
        "machine": machine(),
        "rounds": rounds,
        "threads": threads,
        "dtype": dtype,
        "layers": layers,
        "width": width,
        "tokens": shape.context,
        "vocab": vocab,
        "num_parameters": numel,
        "cap_bytes": cap,
        "samples": samples,
        "beams": BEAMS,
        "search_s": search_s,
        "timed_s": time.perf_counter() - started_at - search_s,
        "contenders": compared(found, BASELINE),
        "post": compared(POST, "baseline"),
    }
    publish(output, "seq2seq", report, sections(report), columns=3)


def _python(jobs: Iterable[Job]) -> str:
    """Return an interpreter that has imported all jobs' libraries, which saves seconds per try."""
    packages = [NEEDS[job.side] for job in jobs if job.side in NEEDS and not missing(job.side)]
    environment = {**own_environment(), **CPU_ALONE, **RETURN_FREED}
    return start_server(environment, __name__, *IMPORTED, *dict.fromkeys(packages))


def job_of(name: str, shape: GptShape, threads: int, dtype: str) -> Job:
    """Return a contender's job with a micro-batch of 1, which the search replaces."""
    side, stage, zero = CONTENDERS[name]
    return Job(
        *(name, side, shape),
        micro_batch=1,
        steps=TRY_STEPS,
        model="t5",
        dtype=dtype,
        stage=stage,
        zero=zero,
        ranks=1 if name == ALONE else 2,
        threads=threads,
    )


def search(job: Job, cap: int, most: int, runner: Runner) -> Row:
    """Return a row with the largest micro-batch that fits and all tries, or with the failure."""

    def attempt(batch: int) -> Row:
        each = {"train": batch * TRY_STEPS * job.ranks, "evaluate": 0}
        row = start(replace(job, micro_batch=batch), cap, each, runner)
        said = "failed" if not has_figures(row) else f"{row['peak_bytes'] / MIB:.0f} MiB"
        print(f"{job.name}: micro-batch {batch}: {said}", flush=True)
        return row

    reason = missing(job.side)
    if reason:
        return {"failure": reason}
    if job.side in NEEDS and job.is_offloaded:  # one rank compiles DeepSpeed's Adam for all
        start(replace(job.dry(), ranks=1), CARD_BYTES, {"train": 2, "evaluate": 2}, runner)
    return largest_batch(attempt, cap, most)


def largest_batch(attempt: Attempt, cap: int, most: int) -> Row:
    """Return the largest ``batch`` up to ``most`` that fits, and all ``tries``.

    If none fits, the row has ``failure`` instead. If an attempt fails, its row is returned. After
    `FIRST_TRIES`, the next batch is where memory, interpolated linearly, meets the cap: between the
    largest batch that fits and the smallest that does not, if both exist.
    """
    tries: dict[int, Row] = {}
    fits, over = 0, most + 1
    while over - fits > 1:
        batch = min(max(_next(tries, cap), fits + 1), over - 1)
        row = attempt(batch)
        if not has_figures(row):
            return row
        tries[batch] = {key: row[key] for key in ("peak_bytes", "is_over")}
        fits, over = (fits, batch) if row["is_over"] else (batch, over)
    listed = [{"batch": batch, **tries[batch]} for batch in sorted(tries)]
    if fits == 0:
        return {"failure": f"micro-batch 1 is over the cap of {cap / MIB:.0f} MiB", "tries": listed}
    return {"batch": fits, "tries": listed}


def _next(tries: Mapping[int, Row], cap: int) -> int:
    if len(tries) < len(FIRST_TRIES):
        return FIRST_TRIES[len(tries)]
    fits = sorted(batch for batch in tries if not tries[batch]["is_over"])
    over = sorted(batch for batch in tries if tries[batch]["is_over"])
    first, second = sorted([*fits[-1:], *over[:1]] if fits and over else sorted(tries)[-2:])
    low, high = (tries[batch]["peak_bytes"] for batch in (first, second))
    slope = (high - low) / (second - first)
    return first + int((cap - low) / slope) if slope > 0 else second


def timed(
    jobs: Mapping[str, Job],
    searched: Rows,
    cap: int,
    samples: Mapping[str, int],
    rounds: int,
    runner: Runner,
) -> dict[str, Row]:
    """Return the rows of all contenders: results of the search, median seconds, peaks.

    If a whole run exceeds the cap although two steps did not, the micro-batch is reduced by one.
    """
    batches = {name: row["batch"] for name, row in measured(searched).items()}

    def run(name: str, number: int) -> Row:
        while batches[name]:
            print(f"round {number + 1}/{rounds}: {name}, {batches[name]} samples", flush=True)
            row = start(replace(jobs[name], micro_batch=batches[name]), cap, samples, runner)
            if not has_figures(row) or not row["is_over"]:
                return {**row, "batch": batches[name]}
            batches[name] -= 1
        return {"failure": f"a run with micro-batch 1 is over the cap of {cap / MIB:.0f} MiB"}

    rows = dict(searched)
    for name, found in take_turns(list(batches), rounds, run).items():
        if not has_figures(found[-1]):
            rows[name] = found[-1]
            continue
        last = [row for row in found if row["batch"] == batches[name]]
        times = {key: [row[key] for row in last] for key in ("train_s", "eval_s")}
        rows[name] = {
            **rows[name],
            "batch": batches[name],
            **{key: statistics.median(values) for key, values in times.items()},
            "times_s": times,
            **{key: max(row[key] for row in last) for key in ("peak_bytes", "train_peak_bytes")},
            "loss": last[-1]["loss"],
        }
    return rows


def start(job: Job, cap: int, samples: Mapping[str, int], runner: Runner) -> Row:
    """Run a fresh group of ranks. Return the slowest rank's seconds and the largest peaks."""
    arguments = {"job": job, "cap": cap, "samples": samples}
    target = "lab.experiments.seq2seq:measure"
    ranks = runner.start(target, arguments, job.ranks, threads=job.threads)
    if not has_figures(ranks[0]) or ranks[0]["is_over"]:
        return ranks[0]
    seconds = {key: max(rank[key] for rank in ranks) for key in ("train_s", "eval_s")}
    return {**ranks[0], **seconds, "loss": statistics.fmean(rank["loss"] for rank in ranks)}


def compared(rows: Rows, baseline: str) -> dict[str, Row]:
    """Return the rows with ratios to the baseline. A ratio above 1 is better."""
    base = measured(rows).get(baseline, {})
    found = dict(rows)
    for name, row in measured(rows).items():
        found[name] = {
            **row,
            "batch_ratio": quotient(row["batch"], base.get("batch")),
            "train_ratio": quotient(base.get("train_s"), row["train_s"]),
            "eval_ratio": quotient(base.get("eval_s"), row["eval_s"]),
        }
    return found


class Cap:
    """Memory limit of each rank. See [Note: cap].

    Attributes:
        is_over: whether any rank has exceeded the limit.
        peak: largest memory of any rank, in bytes.
    """

    def __init__(self, nbytes: int) -> None:
        """Start counting memory. Every rank must call it."""
        gc.collect()
        dist.barrier()  # by then all ranks have freed other ranks' shards
        # Otherwise the model would use memory that imports have freed.
        ctypes.CDLL(None).malloc_trim(0)
        restart_peak()
        self._before = resident_bytes()
        self._nbytes = nbytes
        self.peak = 0

    @property
    def is_over(self) -> bool:
        return self.peak > self._nbytes

    def check(self) -> bool:
        """Return whether all ranks are within the limit so far. Every rank must call it."""
        own = torch.tensor([peak_bytes() - self._before])
        dist.all_reduce(own, dist.ReduceOp.MAX)
        self.peak = int(own)
        return not self.is_over


def measure(place: Place, job: Mapping[str, Any], cap: int, samples: Mapping[str, int]) -> Row:
    """Train and evaluate on this rank, and stop if any rank exceeds the cap.

    Args:
        place: this rank.
        job: the contender, with its micro-batch.
        cap: bytes per rank.
        samples: samples over all ranks, to ``train`` and to ``evaluate``.
    """
    what = Job.of(job)
    torch.set_num_threads(what.threads)
    place.join()
    # A first, tiny run imports modules and allocates what does not depend on the model.
    tiny = what.dry()
    _train_and_evaluate(tiny, place, Cap(CARD_BYTES), {"train": 2 * tiny.ranks, "evaluate": 2})
    row = _train_and_evaluate(what, place, Cap(cap), samples)
    dist.barrier()  # no rank may end while another still measures
    return row


def _train_and_evaluate(job: Job, place: Place, cap: Cap, samples: Mapping[str, int]) -> Row:
    side = SIDES[job.side](job, torch.device("cpu"), place)
    if job.side == "fsdp2":
        register_fsdp_forward_method(side.model, "generate")
    # Contenders that train with autocast also evaluate with it.
    is_cast = job.side in ("ddp", "torch") and job.dtype != "fp32"

    def evaluate(ids: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            tokens: Tensor = side.model.generate(ids, beams=BEAMS)
        return tokens

    def run(step: Callable[[Tensor], Tensor], num_samples: int) -> tuple[float, Tensor | None]:
        """Return the seconds of all batches and the last result, or (0.0, None) above the cap."""
        generator = torch.Generator().manual_seed(1 + place.rank)
        started_at, last = time.perf_counter(), None
        for ids in _batches(job, num_samples // job.ranks, generator):
            last = step(ids)
            if not cap.check():
                return 0.0, None
        return time.perf_counter() - started_at, last

    row: Row = {}
    if cap.check() and run(side.step, job.micro_batch * job.ranks)[1] is not None:
        row["train_s"], loss = run(side.step, samples["train"])
        row["train_peak_bytes"] = cap.peak
        if loss is not None:
            row["loss"] = float(loss)
            side.model.eval()
            row["eval_s"], _ = run(evaluate, samples["evaluate"])
    return {**row, "peak_bytes": cap.peak, "is_over": cap.is_over}


def _batches(job: Job, num_samples: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield token ids: int64, ``[micro_batch, context]``. The last batch may be smaller."""
    for first in range(0, num_samples, job.micro_batch):
        size = (min(job.micro_batch, num_samples - first), job.shape.context)
        yield torch.randint(2, job.shape.vocab, size, generator=generator)


def sections(report: Row) -> list[Section]:
    """Return this run's table and panels, and the post's table."""
    rows, post, samples = report["contenders"], report["post"], report["samples"]
    color = green(lambda name: name.startswith("zero"))

    def ratio(heading: str, key: str) -> Column:
        return Column(heading, key, ".2f")

    columns = [
        Column("batch", "batch"),
        ratio("x", "batch_ratio"),
        Column("train, s", "train_s", ".1f"),
        ratio("x", "train_ratio"),
        Column("evaluate, s", "eval_s", ".1f"),
        ratio("x", "eval_ratio"),
    ]
    peak = Column("peak", "peak_bytes", ".0f", MIB)
    panels = [
        *bars("", rows, {"": "batch"}, "largest micro-batch per rank", color=color),
        *bars("", rows, {"": "train_s"}, f"train {samples['train']} samples (s)", color=color),
        *bars("", rows, {"": "eval_s"}, f"evaluate {samples['evaluate']} (s)", color=color),
    ]
    cap = f"{report['cap_bytes'] / MIB:.0f} MiB"
    here = f"T5 of {report['num_parameters'] / 1e6:.1f} M parameters, {cap} per rank"
    caption = f"MiB; x: to {BASELINE}, more is better"
    there = "the post: t5-large, two cards of 24 GiB"
    return [
        Section(here, rows, [*columns, peak], caption, "contender", panels),
        Section(there, post, columns, "x: to the baseline, more is better", "contender"),
    ]
