"""Peak memory against ZeRO's formula and the plan, growth of memory, and start-up time. Linux.

[Note: comparisons]
formula   peak of a rank, divided by the sum of ZeRO's formula (arXiv 1910.02054, sections 3 and 5)
          with gradients summed in fp32, two gathered units, and transient memory: two units'
          gradients, an exchange buffer, one parameter's gradient. The model's activations are
          negligible
growth    resident memory after 500 steps compared with 50, with samples of one or of random length
start-up  seconds of `zero_core.build` by model size
plan      peak of a rank, divided by that of `zero_core.plan`, activations included

The ranks set glibc's ``MALLOC_MMAP_THRESHOLD_`` to 64 KiB, so that freed tensors return to the
system. By default glibc keeps freed blocks of up to 32 MiB. One row of "formula" uses the default.

Memory is a process's resident memory (`benchmarks.harness.memory`) minus its value before the model
was made. The process first trains a small engine with the same configuration, so that libraries,
kernels and the process group's buffers are not counted.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
import torch.distributed as dist

import zero_core
from benchmarks.harness.job import Job
from benchmarks.harness.memory import MIB, peak_bytes, resident_bytes, restart_peak
from benchmarks.harness.models import GptShape
from benchmarks.harness.options import RESULTS, Output, of
from benchmarks.harness.ranks import CPU_ALONE, Place, Row, run_ranks
from benchmarks.harness.report import Column, Section, bars, machine, publish
from benchmarks.harness.sides import engine_loop, torch_loop

RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": str(64 * 1024)}
FORMULA_BAR, PLAN_BAR, FRAGMENTS_BAR, START_BAR_S = 0.03, 0.05, 0.05, 2.0
WARM_STEPS = 2
GROWTH_STEPS = (50, 500)
LARGE = Job(
    *("", "zero", GptShape(layers=64, width=400, heads=8, vocab=256, context=4)),
    micro_batch=1,
    steps=3,
    dtype="bf16",
    ranks=2,
)
MIDDLE = replace(LARGE, shape=GptShape(8, 512, heads=8, vocab=1024, context=256), micro_batch=2)
TRANSLATION = Job(
    *("", "zero", GptShape(layers=12, width=256, heads=16, vocab=8032, context=32)),
    micro_batch=16,
    steps=3,
    model="t5",
    ranks=2,
)
SMALL = replace(LARGE, shape=GptShape(6, 256, heads=4, vocab=256, context=32), dtype="fp32")


def formula_rows() -> Iterator[Row]:
    """Yield a row per stage, and one for stage 3 with glibc's default settings."""
    cases: list[tuple[int, Mapping[str, str], str]] = [(s, RETURN_FREED, "") for s in range(4)]
    for stage, environment, note in [*cases, (3, {}, ", glibc's own settings")]:
        job = replace(LARGE, stage=stage)
        found = _run(job, environment)
        numel, shard = job.shape.numel, 1 / job.ranks
        # bf16 weights, bf16 gradients of a backward, and in fp32 their sum and optimizer states.
        weights, gradients = 2 * (shard if stage == 3 else 1), 2 if stage < 2 else 0
        kept = weights + gradients + 16 * (shard if stage >= 1 else 1)
        # Two gathered units of 2-byte elements.
        gathered = 2 * 2 * (numel // job.shape.layers) if stage == 3 else 0
        formula = round(kept * numel) + gathered
        planned = job.plan(has_activations=True, device_type="cpu").memory.device
        kinds = ("gradients under way", "exchange buffers", "parameter gradient", "activations")
        passing = sum(planned.get(kind, 0) for kind in kinds)
        peak = _most(found, "peak_bytes")
        yield {
            "case": f"stage {stage}{note}",
            "num_parameters": numel,
            "formula_bytes": formula,
            "passing_bytes": passing,
            "peak_bytes": peak,
            "ratio": peak / (formula + passing),
            "is_met": None if note else peak <= (1 + FORMULA_BAR) * (formula + passing),
        }


def growth_rows() -> Iterator[Row]:
    """Yield resident memory after 50 and 500 steps, for every stage and for random lengths."""
    jobs = [replace(SMALL, stage=stage) for stage in range(4)]
    random = replace(SMALL, stage=3, shape=replace(SMALL.shape, context=128), shortest=2)
    for job in [*jobs, random, replace(random, side="torch", ranks=1)]:
        job = replace(job, steps=GROWTH_STEPS[-1])
        found = _run(job, RETURN_FREED, GROWTH_STEPS)
        is_bare = job.side == "torch"
        if is_bare:
            held = 16 * job.shape.numel
        else:
            planned = job.plan(has_activations=True, device_type="cpu").memory.device
            held = sum(found[0]["held_bytes"].values()) + planned["optimizer states"]
        early, late = (max(f["resident_bytes"][str(mark)] for f in found) for mark in GROWTH_STEPS)
        name = "the bare model, 1 rank" if is_bare else f"stage {job.stage}"
        yield {
            "case": f"{name}, random lengths" if job.shortest else name,
            "held_bytes": held,
            "early_bytes": early,
            "late_bytes": late,
            "ratio": (late - early) / held,
            "is_met": None if is_bare else late - early <= FRAGMENTS_BAR * held,
        }


def start_rows() -> Iterator[Row]:
    """Yield the seconds of `zero_core.build` on four ranks, by number of parameters."""
    for layers in (16, 32, 64):
        shape = replace(LARGE.shape, layers=layers)
        found = _run(replace(LARGE, shape=shape, ranks=4, stage=3, steps=0), {})
        seconds = _most(found, "build_s")
        cpu_s = sum(f["build_cpu_s"] for f in found)
        yield {
            "case": f"{shape.numel / 1e6:.0f} M parameters, 4 ranks",
            "num_parameters": shape.numel,
            "build_s": seconds,
            "cpu_s_of_all_ranks": cpu_s,
            "ratio": cpu_s / shape.numel * 1e9,  # CPU seconds per 1e9 parameters
            "is_met": seconds < START_BAR_S,
        }


def plan_rows() -> Iterator[Row]:
    """Yield measured over planned peak, for a grid of configurations and for a T5."""
    grid = itertools.product((1, 2, 3), range(4), ("fp32", "bf16"), ("none", "cpu"))
    cases = [
        (replace(MIDDLE, ranks=ranks, stage=stage, dtype=dtype), offload)
        for ranks, stage, dtype, offload in grid
        if ranks > 1 or not stage  # stages 1 to 3 shard nothing on one rank
    ]
    cases += [
        (replace(TRANSLATION, micro_batch=batch, stage=stage), offload)
        for batch, stage, offload in itertools.product((4, 16), (2, 3), ("none", "cpu"))
    ]
    for job, offload in cases:
        zero = {"offload_optimizer": {"device": "cpu"}} if offload == "cpu" else {}
        job = replace(job, zero=zero)
        use = job.plan(has_activations=True, device_type="cpu").memory
        planned = use.device_bytes + use.host_bytes
        peak = _most(_run(job, RETURN_FREED), "peak_bytes")
        name = f"T5, {job.micro_batch} samples, " if job.model == "t5" else ""
        yield {
            "case": f"{name}{job.ranks} ranks, stage {job.stage}, {job.dtype}, offload {offload}",
            "planned_bytes": planned,
            "peak_bytes": peak,
            "ratio": peak / planned,
            "is_met": abs(peak / planned - 1) <= PLAN_BAR,
        }


PARTS = {
    "formula": (formula_rows, "peak over the formula and what is passing (bar 1.03)"),
    "growth": (growth_rows, "growth from step 50 to 500, of what is held (bar 0.05)"),
    "start": (start_rows, "CPU seconds of build, all ranks, per 10^9 parameters"),
    "plan": (plan_rows, "peak over the plan (bar 0.95 to 1.05)"),
}
"""Maps a measurement to its rows (``case``, ``ratio``, ``is_met``) and the meaning of the ratio."""


def main(only: Annotated[list[str] | None, of(PARTS)] = None, output: Output = RESULTS) -> None:
    parts: dict[str, list[Row]] = {}
    for part in only or PARTS:
        parts[part] = []
        for row in PARTS[part][0]():
            parts[part].append(row)
            print(f"{part}: {row['case']}: {row['ratio']:.3f}", flush=True)
    report = {"machine": machine(), "parts": parts}
    publish(output, "memory", report, [section(part, rows) for part, rows in parts.items()])


def section(part: str, listed: Sequence[Row]) -> Section:
    rows = {row["case"]: row for row in listed}

    def column(key: str) -> Column:
        unit = MIB if key.endswith("_bytes") else 1.0
        is_float = isinstance(listed[0][key], float)
        spec = ".1f" if unit > 1 else ".3f" if is_float else ""
        return Column(key.replace("_bytes", "").replace("_", " "), key, spec, unit)

    def color(case: str) -> str:
        return "tab:red" if rows[case]["is_met"] is False else "tab:blue"

    worst = max(listed, key=lambda row: float(row["ratio"]))
    return Section(
        *(part, rows, [column(key) for key in listed[0] if key != "case"]),
        caption=f"MiB; furthest: {worst['case']}, {worst['ratio']:.3f}",
        heading="case",
        panels=bars(PARTS[part][1], rows, {"": "ratio"}, "", color=color),
    )


def _most(found: Sequence[Row], key: str) -> float:
    return max(float(of_rank[key]) for of_rank in found)


def _run(job: Job, environment: Mapping[str, str], marks: Sequence[int] = ()) -> list[Row]:
    arguments = {"job": job, "marks": list(marks)}
    environment = {**CPU_ALONE, **environment}
    return run_ranks(f"{__name__}:measure", arguments, job.ranks, environment=environment)


def measure(place: Place, job: Mapping[str, Any], marks: Sequence[int]) -> Row:
    """Train on this rank. Return seconds, and memory minus the memory before the model was made.

    Resident memory is also recorded after each step in ``marks``.
    """
    what = Job.of(job)
    torch.set_num_threads(1)
    place.join()
    tiny = replace(what.shape, layers=2, width=64, heads=1)
    _train(replace(what, shape=tiny, steps=WARM_STEPS), place, ())
    return _train(what, place, marks)


def _train(job: Job, place: Place, marks: Sequence[int]) -> Row:
    gc.collect()
    before = resident_bytes()
    model = job.make_model()
    restart_peak()
    dist.barrier()
    started_at, cpu_at = time.perf_counter(), time.process_time()
    engine = zero_core.build(model, job.config()) if job.side == "zero" else None
    step = torch_loop(job, model).step if engine is None else engine_loop(engine)
    found: Row = {
        "build_s": time.perf_counter() - started_at,
        "build_cpu_s": time.process_time() - cpu_at,
    }
    dist.barrier()
    restart_peak()
    inputs = job.batches(place.rank)
    resident = {}
    for number in range(1, job.steps + 1):
        step(next(inputs))
        if number in marks:
            resident[number] = resident_bytes() - before
    dist.barrier()
    found |= {
        "peak_bytes": peak_bytes() - before,
        "resident_bytes": resident,
        "held_bytes": {} if engine is None else engine.memory_report(),
    }
    dist.barrier()  # no rank may end while another still measures
    return found
