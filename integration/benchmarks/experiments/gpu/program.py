"""Is the engine right and fast on one accelerator.

[Note: parts]
correct        equivalence with DDP and torch's optimizers at every stage, with and without offload
               and quantized collectives; the same bits with every stream delayed at random
twin_flow_1b   tokens/s over the ratio, 1.3 B parameters, beside FSDP2 and DeepSpeed
twin_flow_7b   the same, 6.7 B parameters
roofline       an offloaded step over the slowest of its bounds
largest        10 B parameters within 32 GiB of device memory, 13 B within 128 GiB of the host's;
               the peak against the plan
single         nothing offloaded: the engine against plain torch
quantizers     Triton's kernels against copy bandwidth
fragmentation  random lengths: the allocator's reserved over its allocated memory

Each part runs in processes of its own and needs nothing from a network. ``--dry-run`` is the same
program with tiny models on the CPU: figures of an accelerator are null there.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.experiments.gpu import bounds, capacity, fragmentation, quantizers, single, speed
from benchmarks.experiments.gpu.correct import groups
from benchmarks.experiments.gpu.part import Context, Part
from benchmarks.experiments.gpu.results import Results, has_figures, provenance
from benchmarks.harness.options import RESULTS, DryRun, choose, find_device_type
from benchmarks.harness.ranks import Row, Runner
from benchmarks.harness.report import make_console, reasons

PARTS = (
    *(groups.PART, speed.SMALLER, speed.LARGER, bounds.PART, capacity.PART, single.PART),
    *(quantizers.PART, fragmentation.PART),
)
MINUTE_S = 60


def main(
    only: Annotated[
        list[str] | None, typer.Option(help=f"Parts, of: {', '.join(p.name for p in PARTS)}; all.")
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0, help="Time for everything; what is left then is skipped.")
    ] = 9.0,
    out: Annotated[Path, typer.Option(help="Folder for gpu.json, gpu.png and traces.")] = RESULTS,
    dry_run: DryRun = False,
) -> None:
    """Measure one accelerator part by part."""
    known = {part.name: part for part in PARTS}
    parts = [known[name] for name in choose(only, known, "part", "--only")]
    device = find_device_type(is_dry_run=dry_run)
    try:
        results = Results(out)
        if dry_run:
            results.refuse_dry_run(part.name for part in parts)
        measured = provenance(device, is_dry_run=dry_run)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    console = make_console()
    clock = Runner(minutes * MINUTE_S, device_type=device.type)
    found = {}
    for place, part in enumerate(parts):
        left_s = clock.left_s() * part.share / sum(p.share for p in parts[place:])
        console.print(f"{part.name}: {part.about} ({left_s:.0f} s)")
        runner = Runner(left_s, device_type=device.type)
        context = Context(device, dry_run, runner, console, out.resolve() / "traces" / part.name)
        found[part.name] = _run(part, context)
        if not results.add(part.name, found[part.name], measured):
            console.print(f"{part.name}: no figures; those of an earlier run stay")
    console.print(f"written to {out}")
    for part in parts:
        if has_figures(found[part.name]):
            console.print(part.table(found[part.name]))
        for line in reasons(found[part.name]["rows"], f"{part.name}: "):
            console.print(line)
    results.draw(PARTS)


def _run(part: Part, context: Context) -> Row:
    """Return the part's result. An error of its own is a row too, so that the other parts run."""
    try:
        return part.run(context)
    except Exception as error:
        traceback.print_exc()
        return {"rows": {"all": {"failure": f"{type(error).__name__}: {error}"}}}
