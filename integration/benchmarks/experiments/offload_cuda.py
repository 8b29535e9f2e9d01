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

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from benchmarks.experiments.gpu import bounds, capacity, speed
from benchmarks.experiments.gpu.part import Context
from benchmarks.experiments.gpu.sizes import DRY, REAL, Sizes
from benchmarks.harness.memory import GIB
from benchmarks.harness.options import RESULTS, DryRun, Output, choose, find_device_type
from benchmarks.harness.ranks import Row, Runner, write_json
from benchmarks.harness.report import machine, make_console, reasons, save_panels
from benchmarks.harness.rounds import measured
from zero_engine.machine import memory_limit_bytes

PARTS = {"speed": speed, "timeline": bounds, "capacity": capacity}
DAY_S = 24 * 3600


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"Parts, of: {', '.join(PARTS)}.")] = None,
    contender: Annotated[
        list[str] | None, typer.Option(help="Of the part speed, as 'ratio 0.6' or 'fsdp2'; all.")
    ] = None,
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
    ] = REAL.device_limit_bytes / GIB,
    time_limit: Annotated[
        float, typer.Option(min=0, help="Seconds after which what is left is skipped.")
    ] = DAY_S,
    dry_run: DryRun = False,
    output: Output = RESULTS,
) -> None:
    """Measure and write ``offload_cuda.json`` and ``offload_cuda.png`` after each part."""
    chosen = choose(only, PARTS, "part", "--only")
    device = find_device_type(is_dry_run=dry_run)
    sizes = _resize(
        DRY if dry_run else REAL,
        {"layers": layers, "width": width},
        {"rounds": rounds, "steps": steps, "micro_batch": micro_batch, "stage": stage},
    )
    sizes = replace(sizes, device_limit_bytes=round(device_limit_gib * GIB))
    jobs = {job.name: job for job in speed.speed_jobs(sizes)}
    racing = [jobs[name] for name in choose(contender, jobs, "contender", "--contender")]
    console = make_console()
    runner = Runner(time_limit, device_type=device.type)
    context = Context(device, dry_run, runner, console, output.resolve() / "traces/offload_cuda")
    run: dict[str, Callable[[], Row]] = {
        "speed": lambda: speed.speed(racing, sizes.rounds, context),
        "timeline": lambda: bounds.timeline(sizes, bounds.RATIOS, context),
        "capacity": lambda: capacity.capacity(capacity.capacity_jobs(sizes), sizes, context),
    }
    about = {"device_type": device.type, **machine(), "host_bytes": memory_limit_bytes()}
    skipped: list[str] = []
    parts: dict[str, Row] = {}
    report = {
        "is_dry_run": dry_run,
        "settings": asdict(sizes),
        "machine": about,
        "skipped": skipped,
        "parts": parts,
    }
    output.mkdir(parents=True, exist_ok=True)
    for name in chosen:
        if runner.left_s():
            parts[name] = run[name]()
        else:
            skipped.append(f"{name}: the time limit of {time_limit:.0f} s is over")
        write_json(output / "offload_cuda.json", report)
        panels = []
        for part, found in parts.items():
            if rows := measured(found["rows"]):
                draw = lambda axes, p=part, f=found: PARTS[p].draw(axes, f)  # noqa: E731
                panels.append((part, len(rows) + 3, draw))
        save_panels(output / "offload_cuda.png", panels)
    console.print(f"written to {output}")
    for name, found in parts.items():
        if measured(found["rows"]):
            console.print(PARTS[name].table(found))
        for who, row in found["rows"].items():
            if settled := row.get("ratio_report"):
                reason = f"settled on {settled['ratio']:.3f}: {settled['reason']}"
                console.print(f"{name}: {who}: {reason}")
        for line in reasons(found["rows"], f"{name}: "):
            console.print(line)
    for line in skipped:
        console.print(line)


def _resize(sizes: Sizes, of_shape: dict[str, int | None], others: dict[str, int | None]) -> Sizes:
    """Return ``sizes`` with the options that are given."""
    shape = replace(sizes.shape, **{k: v for k, v in of_shape.items() if v is not None})
    if shape.width % shape.heads:
        raise typer.BadParameter(
            f"{shape.width} is not a multiple of {shape.heads} heads", param_hint="--width"
        )
    given: dict[str, Any] = {k: v for k, v in others.items() if v is not None}
    return replace(sizes, shape=shape, **given)
