"""Step time with copies of all states in memory (``memory_checkpoint``) and without.

Two engines train the same GPT-2 in fp32 with AdamW on the same ranks, in turn. A turn ends when its
last copy is complete.

[Note: figures]
step     median over the turns of the seconds per step, without copies
copied   the same with copies
longer   median over the turns of copied / step - 1
CPU      the same ratio for the CPU time, user and system, of all threads of rank 0
+-       standard error of the preceding median, from the quartiles of the turns
bytes    bytes that a rank copies per step
bound    seconds to copy these bytes at rank 0's memory bandwidth, over step. It is the cost of
         copies that overlap with nothing
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

import zero_core
from benchmarks.harness.job import Job
from benchmarks.harness.memory import MIB
from benchmarks.harness.options import RESULTS, Context, MicroBatch, Output, parse_size
from benchmarks.harness.ranks import Place, Row, Runner
from benchmarks.harness.report import MS, Column, Section, machine, publish
from lab.experiments.in_turn.turns import Taken, comparison, train_in_turn

_MEMORY = Path("/dev/shm")
_BANDWIDTH_BYTES = 256 << 20
_TARGET = 0.02


def measure(place: Place, job: Mapping[str, Any], turns: int, memory: str) -> Row:
    """Return the figures of this rank. See [Note: figures]."""
    what = Job.of(job)
    torch.set_num_threads(what.threads)
    place.join()
    engines = {
        name: zero_core.build(what.make_model(), {**what.config(), **keys})
        for name, keys in (("plain", {}), ("copied", {"memory_checkpoint": {"path": memory}}))
    }
    engines["copied"].resume(Path(memory, "none"))
    found: dict[str, list[Taken]] = {name: [] for name in engines}
    batches = what.batches(place.rank)
    for name, taken in train_in_turn(
        engines, batches, steps=what.steps, turns=turns, finish=_wait_for_copies
    ):
        found[name].append(taken)
    dist.barrier()
    copied = list(Path(memory).glob(f"*/0/*-{place.rank:05d}.safetensors"))
    row: Row = {"bytes": sum(path.stat().st_size for path in copied)}
    row |= comparison(found["plain"], found["copied"], "copied")
    row["bound"] = row["bytes"] / _bytes_per_s() / row["step_s"]
    return row


def _wait_for_copies(engine: zero_core.Engine) -> None:
    with engine.rewriting():  # `rewriting` waits until the engine's last copy is complete
        pass


def _bytes_per_s() -> float:
    """Return the bandwidth of a copy from memory to memory."""
    source, target = (torch.ones(_BANDWIDTH_BYTES, dtype=torch.uint8) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - began)
    return _BANDWIDTH_BYTES / best


def main(
    size: Annotated[str, typer.Option(help="LAYERSxWIDTH of the GPT-2.")] = "6x512",
    context: Context = 256,
    micro_batch: MicroBatch = 8,
    ranks: Annotated[int, typer.Option(min=1)] = 2,
    stage: Annotated[int, typer.Option(min=0, max=3)] = 2,
    is_offloaded: Annotated[bool, typer.Option("--offload", help="States on the host.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a turn.")] = 2,
    turns: Annotated[int, typer.Option(min=2, help="Pairs of measured turns.")] = 6,
    threads: Annotated[int, typer.Option(min=1, help="Of each rank.")] = 1,
    output: Output = RESULTS,
) -> None:
    """Measure, write ``copies.json``, and print a table."""
    job = Job(
        *("", "zero", parse_size(size, vocab=8192, context=context)),
        micro_batch=micro_batch,
        steps=steps,
        stage=stage,
        ranks=ranks,
        zero={"offload_optimizer": {"device": "cpu"}} if is_offloaded else {},
        threads=threads,
    )
    memory = tempfile.mkdtemp(dir=_MEMORY)
    try:
        arguments = {"job": job, "turns": turns, "memory": memory}
        row = Runner().start(f"{__name__}:measure", arguments, ranks, threads=threads)[0]
    finally:
        shutil.rmtree(memory)
    columns = [
        Column("step, ms", "step_s", ".0f", MS),
        Column("copied, ms", "copied_s", ".0f", MS),
        Column("longer", "longer_s", "+.1%"),
        Column("+-", "error_s", ".1%"),
        Column("CPU", "longer_cpu_s", "+.1%"),
        Column("+-", "error_cpu_s", ".1%"),
        Column("MiB", "bytes", ".0f", MIB),
        Column("bound", "bound", "+.1%"),
        Column(f"at most {_TARGET:.0%}", lambda row: row["longer_s"] <= _TARGET),
    ]
    tokens = micro_batch * context
    title = f"Copies in memory of {job.title}, stage {stage}, {tokens} tokens per rank and step"
    report = {"machine": machine(), "workload": job.workload, "figures": row}
    publish(output, "copies", report, [Section(title, {"after every step": row}, columns)])
