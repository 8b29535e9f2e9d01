"""Optimizer state off one accelerator.

[Note: parts]
speed     tokens/s at every ratio, beside FSDP2's CPUOffloadPolicy and DeepSpeed's ZeRO-Offload
timeline  a step over the slowest of its bounds: the device's kernels, the bus, the host's memory
capacity  the 10 B model of the ZeRO-Offload tutorial in 32 GiB of device memory; a 13 B model with
          8-bit states in 128 GiB of host memory

Needs one accelerator and nothing from a network. ``--dry-run`` is the same program with tiny models
on the CPU, where figures of an accelerator are null.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from benchmarks.experiments.gpu import bounds, capacity, speed
from benchmarks.experiments.gpu.part import Context
from benchmarks.harness.memory import GIB
from benchmarks.harness.options import RESULTS, DryRun, Output, find_device_type, of
from benchmarks.harness.ranks import Row, Runner
from benchmarks.harness.report import machine, publish, write_report
from zero_engine.machine import memory_limit_bytes

PARTS = {"speed": speed.section, "timeline": bounds.section, "capacity": capacity.section}
DAY_S = 24 * 3600


def main(
    only: Annotated[list[str] | None, of(PARTS)] = None,
    contender: Annotated[list[str] | None, of(job.name for job in speed.speed_jobs())] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Of the part speed; 3.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Timed steps; 10.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Of speed and timeline; 24.")] = None,
    width: Annotated[
        int | None, typer.Option(min=64, help="A multiple of the heads, 16; 2048.")
    ] = None,
    micro_batch: Annotated[int | None, typer.Option(min=1, help="Samples per step; 4.")] = None,
    stage: Annotated[int, typer.Option(min=1, max=3, help="Of this engine.")] = 2,
    device_limit_gib: Annotated[
        float, typer.Option(min=0, help="Device memory of the part capacity.")
    ] = capacity.DEVICE_LIMIT_BYTES / GIB,
    time_limit: Annotated[
        float, typer.Option(min=0, help="Seconds after which what is left is skipped.")
    ] = DAY_S,
    dry_run: DryRun = False,
    output: Output = RESULTS,
) -> None:
    """Measure and write ``offload_cuda.json`` after each part, then ``offload_cuda.png``."""
    device = find_device_type(is_dry_run=dry_run)
    first = replace(speed.SPEED.dry() if dry_run else speed.SPEED, stage=stage)
    first = replace(first, **_given(steps=steps, micro_batch=micro_batch))
    first = replace(first, shape=replace(first.shape, **_given(layers=layers, width=width)))
    if first.shape.width % first.shape.heads:
        raise typer.BadParameter(
            f"{first.shape.width} is not a multiple of {first.shape.heads} heads",
            param_hint="--width",
        )
    rounds = rounds or (1 if dry_run else speed.ROUNDS)
    jobs = {job.name: job for job in speed.speed_jobs(first)}
    racing = [jobs[name] for name in contender or jobs]
    limit = round(device_limit_gib * GIB)
    large = capacity.capacity_jobs(stage=stage, device_limit_bytes=limit)
    runner = Runner(time_limit, device_type=device.type)
    context = Context(device, dry_run, runner, output.resolve() / "traces/offload_cuda")
    skipped: list[str] = []
    parts: dict[str, Row] = {}
    report = {
        "is_dry_run": dry_run,
        "settings": {**asdict(first), "rounds": rounds, "device_limit_bytes": limit},
        "machine": {"device_type": device.type, **machine(), "host_bytes": memory_limit_bytes()},
        "skipped": skipped,
        "parts": parts,
    }
    for name in only or PARTS:
        if not runner.left_s():
            skipped.append(f"{name}: the time limit of {time_limit:.0f} s is over")
        elif name == "speed":
            parts[name] = speed.speed(racing, rounds, context)
        elif name == "timeline":
            parts[name] = bounds.timeline(first, bounds.RATIOS, context)
        else:
            parts[name] = capacity.capacity(large, context)
        write_report(output, "offload_cuda", report)
    sections = {name: PARTS[name](found) for name, found in parts.items()}
    publish(output, "offload_cuda", report, list(sections.values()))
    for name, found in parts.items():
        for who, row in found["rows"].items():
            if settled := row.get("ratio_report"):
                reason = f"settled on {settled['ratio']:.3f}: {settled['reason']}"
                print(f"{name}: {who}: {reason}")
    print(*skipped, sep="\n")


def _given(**options: int | None) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
