"""``python -m zero_engine.bench.gpu``: see the package for its parts."""

from __future__ import annotations

import sys
import traceback
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
from zero_engine.bench.gpu.part import Context, Part, Row
from zero_engine.bench.gpu.quantizers import PART as QUANTIZERS
from zero_engine.bench.gpu.results import Results, has_figures, provenance
from zero_engine.bench.gpu.roofline import PART as ROOFLINE
from zero_engine.bench.gpu.single import PART as SINGLE
from zero_engine.bench.gpu.twin_flow import LARGER, SMALLER
from zero_engine.bench.offload_cuda.jobs import Clock, Runner

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
    out: Annotated[Path, typer.Option(help="Folder for gpu.json, gpu.png and traces.")] = Path(
        "integration/benchmarks/results"
    ),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tiny, on the CPU.")] = False,
) -> None:
    """Measure one accelerator part by part."""
    parts = _chosen(only)
    if not dry_run and not torch.accelerator.is_available():
        raise typer.BadParameter(
            "torch finds no accelerator; --dry-run is the same program on the CPU"
        )
    device = _device_type(is_dry_run=dry_run)
    try:
        results = Results(out)
        if dry_run:
            results.refuse_dry_run(part.name for part in parts)
        measured = provenance(device, is_dry_run=dry_run)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    console = Console(
        width=None if sys.stdout.isatty() else PAGE_WIDTH, highlight=False, markup=False
    )
    clock = Clock(minutes * MINUTE_S)
    found = {}
    for place, part in enumerate(parts):
        left_s = clock.left_s() * part.share / sum(p.share for p in parts[place:])
        console.print(f"{part.name}: {part.about} ({left_s:.0f} s)")
        runner = Runner(Clock(left_s), device_type=device.type)
        context = Context(device, dry_run, runner, console, out.resolve() / "traces" / part.name)
        found[part.name] = _run(part, context)
        if not results.add(part.name, found[part.name], measured):
            console.print(f"{part.name}: no figures; those of an earlier run stay")
    console.print(f"written to {out}")
    for part in parts:
        _show(part, found[part.name], console)
    results.draw(PARTS)


def _device_type(*, is_dry_run: bool) -> torch.device:
    """The device without its number: to ask for that takes memory on it."""
    accelerator = None if is_dry_run else torch.accelerator.current_accelerator()
    return torch.device("cpu") if accelerator is None else torch.device(accelerator.type)


def _chosen(only: Sequence[str] | None) -> list[Part]:
    known = {part.name: part for part in PARTS}
    unknown = [name for name in only or () if name not in known]
    if unknown:
        raise typer.BadParameter(
            f"unknown part {unknown[0]!r}; known: {', '.join(known)}", param_hint="--only"
        )
    return [known[name] for name in dict.fromkeys(only or known)]


def _run(part: Part, context: Context) -> Row:
    """What the part found; an error of its own is a row too, so that the other parts still run."""
    try:
        return part.run(context)
    except Exception as error:
        traceback.print_exc()
        return {"rows": {"all": {"failure": f"{type(error).__name__}: {error}"}}}


def _show(part: Part, found: Row, console: Console) -> None:
    """The part's table, then a line for every row without figures."""
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
