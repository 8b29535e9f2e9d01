"""``python -m zero_engine.bench.gpu``: see the package for its parts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from zero_engine.bench.gpu import __doc__ as about
from zero_engine.bench.gpu.correct import PART as CORRECT
from zero_engine.bench.gpu.fragmentation import PART as FRAGMENTATION
from zero_engine.bench.gpu.largest import PART as LARGEST
from zero_engine.bench.gpu.part import Context, Part
from zero_engine.bench.gpu.quantizers import PART as QUANTIZERS
from zero_engine.bench.gpu.results import Results, has_figures, provenance
from zero_engine.bench.gpu.roofline import PART as ROOFLINE
from zero_engine.bench.gpu.single import PART as SINGLE
from zero_engine.bench.gpu.twin_flow import LARGER, SMALLER
from zero_engine.bench.offload_cuda.jobs import Clock, Runner, find_device

PARTS = (CORRECT, SMALLER, LARGER, ROOFLINE, LARGEST, SINGLE, QUANTIZERS, FRAGMENTATION)
PAGE_WIDTH = 110
MINUTE_S = 60


def main(
    only: Annotated[
        list[str] | None, typer.Option(help=f"Parts, of: {', '.join(p.name for p in PARTS)}; all.")
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0, help="Time for everything; what is left then is skipped.")
    ] = 9.0,
    out: Annotated[Path, typer.Option(help="Folder for gpu.json and gpu.png.")] = Path(
        "integration/benchmarks/results"
    ),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tiny, on the CPU.")] = False,
) -> None:
    """Measure one accelerator part by part."""
    parts = _chosen(only)
    device = torch.device("cpu") if dry_run else find_device()
    if device.type == "cpu" and not dry_run:
        raise typer.BadParameter(
            "torch finds no accelerator; --dry-run is the same program on the CPU"
        )
    try:
        results = Results(out)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--out") from error
    console = Console(
        width=None if sys.stdout.isatty() else PAGE_WIDTH, highlight=False, markup=False
    )
    _measure(parts, Clock(minutes * MINUTE_S), device, results, console)
    results.draw(PARTS)
    console.print(f"written to {out}")
    for part in parts:
        _show(part, results, console)


def _chosen(only: Sequence[str] | None) -> list[Part]:
    known = {part.name: part for part in PARTS}
    unknown = [name for name in only or () if name not in known]
    if unknown:
        raise typer.BadParameter(
            f"unknown part {unknown[0]!r}; known: {', '.join(known)}", param_hint="--only"
        )
    return [known[name] for name in dict.fromkeys(only or known)]


def _measure(
    parts: Sequence[Part], clock: Clock, device: torch.device, results: Results, console: Console
) -> None:
    """Run the parts one after another, each within its share of what is left."""
    is_dry_run = device.type == "cpu"
    measured = provenance(device, is_dry_run=is_dry_run)
    for place, part in enumerate(parts):
        left_s = clock.left_s() * part.share / sum(p.share for p in parts[place:])
        console.print(f"{part.name}: {part.about} ({left_s:.0f} s)")
        runner = Runner(Clock(left_s), device_type=device.type)
        found = part.run(Context(device, is_dry_run, runner, console))
        results.add(part.name, found, measured)


def _show(part: Part, results: Results, console: Console) -> None:
    """The part's table, then a line for every row without figures."""
    found = results.parts[part.name]
    if has_figures(found):
        console.print(part.table(found))
    for name, row in found["rows"].items():
        for kind in ("failure", "skipped"):
            if kind in row:
                console.print(f"{part.name}: {name}: {kind}: {row[kind]}")


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(help=about)(main)

if __name__ == "__main__":
    app()
