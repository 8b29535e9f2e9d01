"""Step time with a log of changed weights (``weight_patches``) and without.

Two engines train the same GPT-2 in bf16 over fp32 master weights with AdamW, in turn. Each turn of
the engine with the log is followed by a patch, whose time is not part of the step times. At the
start of training most weights move by about the learning rate, so patches are larger than later.

[Note: figures]
step     median over the turns of the seconds per step, without a log
logged   the same with a log
longer   median over the turns of logged / step - 1
CPU      the same ratio for the CPU time of all threads of rank 0
+-       standard error of the preceding median, from the quartiles of the turns
patch    median seconds of `weight_patch`
share    largest patch over the bytes of the weights
log      largest log over the planned memory of a rank without it, both in bytes. Activations are
         not included
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Annotated, Any

import torch
import typer

import zero_core
from benchmarks.harness.job import Job
from benchmarks.harness.options import RESULTS, Context, MicroBatch, Output, parse_size
from benchmarks.harness.ranks import Place, Row, Runner
from benchmarks.harness.report import MS, Column, Section, judged, machine, publish
from lab.experiments.in_turn.turns import Taken, comparison, train_in_turn

_TARGET = 0.02
_SHARE_TARGET = 0.03


def measure(place: Place, job: Mapping[str, Any], turns: int, versions: int) -> Row:
    """Return the figures of this rank. See [Note: figures]."""
    what = Job.of(job)
    torch.set_num_threads(what.threads)
    place.join()
    engines = {
        name: zero_core.build(what.make_model(), {**what.config(), **keys})
        for name, keys in (("plain", {}), ("logged", {"weight_patches": {"versions": versions}}))
    }
    logged = engines["logged"]
    weight_bytes = sum(2 * param.numel() for param in what.make_model().parameters())
    found: dict[str, list[Taken]] = {name: [] for name in engines}
    held, patch_s, shares = 0, [], []
    for name, taken in train_in_turn(
        engines, what.batches(place.rank), steps=what.steps, turns=turns
    ):
        found[name].append(taken)
        if name == "logged":
            # Includes the bits of the next patch.
            held = max(held, logged.memory_report()["weight patches"])
            began = time.perf_counter()
            patch = logged.weight_patch(since=logged.patch_version)
            patch_s.append(time.perf_counter() - began)
            shares.append(patch.nbytes / weight_bytes)
    planned = zero_core.plan(what.make_model(), what.config(), what.ranks, device_type="cpu").memory
    return {
        **comparison(found["plain"], found["logged"], "logged"),
        "patch_s": statistics.median(patch_s),
        "share": max(shares),
        "log": held / (planned.device_bytes + planned.host_bytes),
    }


def main(
    size: Annotated[str, typer.Option(help="LAYERSxWIDTH of the GPT-2.")] = "4x256",
    context: Context = 256,
    micro_batch: MicroBatch = 8,
    ranks: Annotated[int, typer.Option(min=1)] = 2,
    stage: Annotated[int, typer.Option(min=0, max=3)] = 2,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-6,
    versions: Annotated[int, typer.Option(min=1, help="Of the log.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a turn.")] = 1,
    turns: Annotated[int, typer.Option(min=2, help="Pairs of measured turns.")] = 40,
    threads: Annotated[int, typer.Option(min=1, help="Of each rank.")] = 1,
    output: Output = RESULTS,
) -> None:
    """Measure, write ``patches.json``, and print a table."""
    job = Job(
        *("", "zero", parse_size(size, vocab=8192, context=context)),
        micro_batch=micro_batch,
        steps=steps,
        dtype="bf16",
        lr=lr,
        stage=stage,
        ranks=ranks,
        threads=threads,
    )
    arguments = {"job": job, "turns": turns, "versions": versions}
    row = Runner().start(f"{__name__}:measure", arguments, ranks, threads=threads)[0]
    columns = [
        Column("step, ms", "step_s", ".0f", MS),
        Column("logged, ms", "logged_s", ".0f", MS),
        Column("longer", lambda r: judged(r["longer_s"], "+.1%", r["longer_s"] <= _TARGET)),
        Column("+-", "error_s", ".1%"),
        Column("CPU", "longer_cpu_s", "+.1%"),
        Column("+-", "error_cpu_s", ".1%"),
        Column("patch, ms", "patch_s", ".0f", MS),
        Column("share", lambda r: judged(r["share"], ".1%", r["share"] <= _SHARE_TARGET)),
        Column("log", lambda r: judged(r["log"], "+.1%", r["log"] <= _TARGET)),
    ]
    tokens = micro_batch * context
    title = f"{job.title}, stage {stage}, learning rate {lr:g}, {tokens} tokens per rank and step"
    report = {"machine": machine(), "workload": job.workload, "figures": row}
    publish(output, "patches", report, [Section(title, {"patches": row}, columns)])
