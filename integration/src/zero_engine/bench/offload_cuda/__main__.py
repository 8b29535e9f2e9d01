"""``python -m zero_engine.bench.offload_cuda``: see the package for its parts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from zero_engine.bench.offload_cuda import __doc__ as about
from zero_engine.bench.offload_cuda.capacity import capacity, capacity_jobs
from zero_engine.bench.offload_cuda.jobs import Clock, Runner, find_device
from zero_engine.bench.offload_cuda.report import picture, show
from zero_engine.bench.offload_cuda.settings import DRY, GIB, REAL, Settings
from zero_engine.bench.offload_cuda.speed import speed, speed_jobs
from zero_engine.bench.offload_cuda.timeline import timeline
from zero_engine.machine import memory_limit_bytes, processor_name

PARTS = ("speed", "timeline", "capacity")
PAGE_WIDTH = 110
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tiny, on the CPU.")] = False,
    output: Annotated[
        Path, typer.Option(help="Folder for offload_cuda.json and offload_cuda.png.")
    ] = Path("integration/benchmarks/results"),
) -> None:
    """Measure what offload costs and what it makes possible on one accelerator."""
    unknown = set(only or ()) - set(PARTS)
    if unknown:
        raise typer.BadParameter(f"unknown part {unknown.pop()!r}", param_hint="--only")
    device = torch.device("cpu") if dry_run else find_device()
    if device.type == "cpu" and not dry_run:
        raise typer.BadParameter(
            "torch finds no accelerator; --dry-run is the same program on the CPU"
        )
    settings = _resize(
        DRY if dry_run else REAL,
        {"layers": layers, "width": width},
        {"rounds": rounds, "steps": steps, "micro_batch": micro_batch, "stage": stage},
    )
    settings = replace(settings, device_limit_bytes=round(device_limit_gib * GIB))
    known = {job.name: job for job in speed_jobs(settings)}
    unknown = set(contender or ()) - set(known)
    if unknown:
        raise typer.BadParameter(
            f"unknown contender {unknown.pop()!r}; known: {', '.join(known)}",
            param_hint="--contender",
        )
    jobs = [known[name] for name in contender or known]
    console = Console(
        width=None if sys.stdout.isatty() else PAGE_WIDTH, highlight=False, markup=False
    )
    runner = Runner(Clock(time_limit), device_type=device.type)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "speed": lambda: speed(jobs, settings, runner, console),
        "timeline": lambda: timeline(settings, runner, console),
        "capacity": lambda: capacity(capacity_jobs(settings), settings, runner, console),
    }
    report: dict[str, Any] = {
        "is_dry_run": dry_run,
        "settings": asdict(settings),
        "machine": _machine(device),
        "skipped": [],
        "parts": {},
    }
    _measure({name: parts[name] for name in only or PARTS}, report, runner.clock, output)
    console.print(f"written to {output}")
    show(report["parts"], console)
    for line in report["skipped"]:
        console.print(line)


def _measure(
    parts: dict[str, Callable[[], dict[str, Any]]],
    report: dict[str, Any],
    clock: Clock,
    output: Path,
) -> None:
    """Run the parts one after another; what was found so far is on disk after each."""
    output.mkdir(parents=True, exist_ok=True)
    for name, run in parts.items():
        if clock.left_s():
            report["parts"][name] = run()
        else:
            report["skipped"].append(f"{name}: the time limit of {clock.limit_s:.0f} s is over")
        text = json.dumps(report, indent=2) + "\n"
        (output / "offload_cuda.json").write_text(text, encoding="utf-8")
        picture(report["parts"], output / "offload_cuda.png")


def _resize(
    settings: Settings, of_shape: dict[str, int | None], others: dict[str, int | None]
) -> Settings:
    """``settings`` with those that are given."""
    shape = replace(settings.shape, **{k: v for k, v in of_shape.items() if v is not None})
    if shape.width % shape.heads:
        raise typer.BadParameter(
            f"{shape.width} is not a multiple of {shape.heads} heads", param_hint="--width"
        )
    given: dict[str, Any] = {k: v for k, v in others.items() if v is not None}
    return replace(settings, shape=shape, **given)


def _machine(device: torch.device) -> dict[str, Any]:
    return {
        "device_type": device.type,  # its name is in the rows: this process leaves it alone
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "host_bytes": memory_limit_bytes(),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=about)(main)
    app()
