"""``python -m zero_engine.bench.comm_cuda``: see the package for what the figures are."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from zero_comm.backend import Backend
from zero_engine.bench.comm_cuda import __doc__ as about
from zero_engine.bench.comm_cuda.backends import find_accelerator, interpreted, on_device
from zero_engine.bench.comm_cuda.jobs import jobs
from zero_engine.bench.comm_cuda.measure import measure
from zero_engine.bench.comm_cuda.report import markdown, picture, verdict
from zero_engine.bench.comm_cuda.settings import DRY, KINDS, MI, REAL, Settings
from zero_engine.bench.comm_cuda.timing import Stopwatch
from zero_engine.machine import processor_name


def main(
    kind: Annotated[
        list[str] | None, typer.Option(help=f"Kinds, of: {', '.join(KINDS)}; all.")
    ] = None,
    largest_mi: Annotated[
        int, typer.Option(min=1, help="No tensors of more than so many Mi elements.")
    ] = 256,
    rounds: Annotated[int | None, typer.Option(min=1, help=f"{REAL.rounds}.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tiny, on the CPU.")] = False,
    output: Annotated[
        Path, typer.Option(help="Folder for comm_cuda.json, comm_cuda.md and comm_cuda.png.")
    ] = Path("integration/benchmarks/results"),
) -> None:
    """Measure the Triton kernels of the block quantizer on one accelerator."""
    unknown = set(kind or ()) - set(KINDS)
    if unknown:
        raise typer.BadParameter(f"unknown kind {unknown.pop()!r}", param_hint="--kind")
    settings = DRY if dry_run else REAL
    settings = replace(
        settings,
        kinds=tuple(kind or KINDS),
        numels=tuple(numel for numel in settings.numels if numel <= largest_mi * MI),
        rounds=rounds or settings.rounds,
    )
    try:
        device = torch.device("cpu") if dry_run else find_accelerator()
        backend = interpreted() if dry_run else on_device(device)
    except LookupError as error:
        raise typer.BadParameter(str(error)) from error
    print(f"{backend.name} backend on {_describe(device)}", flush=True)
    _run(settings, backend, device, output, is_dry_run=dry_run)


def _run(
    settings: Settings, backend: Backend, device: torch.device, output: Path, *, is_dry_run: bool
) -> None:
    """Measure row by row; what was found so far is on disk after each."""
    output.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    report = {
        "is_dry_run": is_dry_run,
        "is_interpreted": is_dry_run and backend.name == "triton",
        "settings": asdict(settings),
        "machine": _machine(device),
        "rows": rows,
    }
    stopwatch = Stopwatch(device)
    for job in jobs(settings, device):
        rows.append(measure(job, backend, settings, stopwatch, device))
        text = json.dumps(report, indent=2) + "\n"
        (output / "comm_cuda.json").write_text(text, encoding="utf-8")
    table = f"{markdown(rows)}\n{verdict(rows)}\n"
    (output / "comm_cuda.md").write_text(table, encoding="utf-8")
    picture(rows, output / "comm_cuda.png")
    print(f"written to {output}\n\n{table}", end="")


def _describe(device: torch.device) -> str:
    if device.type == "cpu":
        return "the CPU, for a dry run: its times say nothing of a GPU"
    return f"{device} ({torch.get_device_module(device).get_device_name(device)})"


def _machine(device: torch.device) -> dict[str, Any]:
    has_triton = importlib.util.find_spec("triton") is not None
    return {
        "device": _describe(device),
        "processor": processor_name(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if has_triton else None,
    }


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(help=about)(main)
    app()
