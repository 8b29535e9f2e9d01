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

from benchmarks.experiments.gpu import bounds, capacity, in_memory, quantizers, speed
from benchmarks.experiments.gpu.correct import groups
from benchmarks.experiments.gpu.part import Context, Part
from benchmarks.experiments.gpu.results import Results, provenance
from benchmarks.harness.options import RESULTS, DryRun, find_device_type, of
from benchmarks.harness.ranks import Row, Runner
from benchmarks.harness.report import save_panels

PARTS = {
    part.name: part
    for part in (
        *(groups.PART, speed.SMALLER, speed.LARGER, bounds.PART, capacity.PART),
        *(in_memory.SINGLE, quantizers.PART, in_memory.FRAGMENTATION),
    )
}
MINUTE_S = 60


def main(
    only: Annotated[list[str] | None, of(PARTS)] = None,
    minutes: Annotated[
        float, typer.Option(min=0, help="Time for everything; what is left then is skipped.")
    ] = 9.0,
    out: Annotated[Path, typer.Option(help="Folder for gpu.json, gpu.png and traces.")] = RESULTS,
    dry_run: DryRun = False,
) -> None:
    """Measure one accelerator part by part."""
    parts = [PARTS[name] for name in only or PARTS]
    device = find_device_type(is_dry_run=dry_run)
    try:
        results = Results(out)
        if dry_run:
            results.refuse_dry_run(part.name for part in parts)
        about = provenance(device, is_dry_run=dry_run)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    clock = Runner(minutes * MINUTE_S, device_type=device.type)
    found = {}
    for place, part in enumerate(parts):
        left_s = clock.left_s() * part.share / sum(p.share for p in parts[place:])
        print(f"{part.name}: {part.about} ({left_s:.0f} s)")
        runner = Runner(left_s, device_type=device.type)
        context = Context(device, dry_run, runner, out.resolve() / "traces" / part.name)
        found[part.name] = _run(part, context)
        if not results.add(part.name, found[part.name], about):
            print(f"{part.name}: no figures; those of an earlier run stay")
    print(f"written to {out}")
    for part in parts:
        part.shown(found[part.name]).show(f"{part.name}: ")
    drawn = [PARTS[name].shown(results.parts[name]) for name in PARTS if name in results.parts]
    save_panels(out / "gpu.png", [panel for section in drawn for panel in section.panels])


def _run(part: Part, context: Context) -> Row:
    """Return the part's result. An error of its own is a row too, so that the other parts run."""
    try:
        return part.run(context)
    except Exception as error:
        traceback.print_exc()
        return {"rows": {"all": {"failure": f"{type(error).__name__}: {error}"}}}
