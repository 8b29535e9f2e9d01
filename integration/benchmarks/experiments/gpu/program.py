"""Is the engine right and fast on one accelerator.

[Note: parts]
correct        equivalence with DDP and torch's optimizers at every stage, with and without offload
               and quantized collectives
twin_flow_1b   tokens/s over the ratio, 1.3 B parameters, beside FSDP2 and DeepSpeed
twin_flow_7b   the same, 6.7 B parameters
roofline       an offloaded step over the slowest of its bounds
largest        10 B parameters within 32 GiB of device memory, 13 B within 128 GiB of the host's;
               the peak against the plan
single         nothing offloaded: the engine against plain torch
quantizers     Triton's kernels against copy bandwidth
fragmentation  random lengths: the allocator's reserved over its allocated memory

Each part runs in processes of its own, needs nothing from a network, and has a file of its own,
with date, machine and commit. ``--dry-run`` is the same program with tiny models on the CPU:
figures of an accelerator are null there, and the files are others.
"""

from __future__ import annotations

import os
import subprocess
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.experiments.gpu import bounds, capacity, correct, in_memory, quantizers, speed
from benchmarks.experiments.gpu.part import Context, Part
from benchmarks.harness.options import RESULTS, DryRun, find_device_type, of
from benchmarks.harness.ranks import Row, Runner
from benchmarks.harness.report import save_panels, write_report
from benchmarks.harness.rounds import measured, version
from zero_engine.machine import memory_limit_bytes, processor_name

PARTS = {
    part.name: part
    for part in (
        *(correct.PART, speed.SMALLER, speed.LARGER, bounds.PART, capacity.PART),
        *(in_memory.SINGLE, quantizers.PART, in_memory.FRAGMENTATION),
    )
}
MINUTE_S = 60
PACKAGES = (
    *("torch", "triton", "deepspeed", "numpy"),
    *("zero-core", "zero-offload", "zero-comm", "cpu-adam", "zero-engine"),
)
COMMIT_VARIABLE = "ZERO_ENGINE_COMMIT"
"""Of the commit that is measured, where the sources lie outside a repository."""


def main(
    only: Annotated[list[str] | None, of(PARTS)] = None,
    minutes: Annotated[
        float, typer.Option(min=0, help="Time for everything; what is left then is skipped.")
    ] = 9.0,
    out: Annotated[Path, typer.Option(help="For gpu-PART.json, gpu.png and traces.")] = RESULTS,
    dry_run: DryRun = False,
) -> None:
    """Measure one accelerator part by part."""
    parts = [PARTS[name] for name in only or PARTS]
    device = find_device_type(is_dry_run=dry_run)
    try:
        about = provenance(device, is_dry_run=dry_run)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    clock = Runner(minutes * MINUTE_S, device_type=device.type)
    sections = []
    for place, part in enumerate(parts):
        left_s = clock.left_s() * part.share / sum(p.share for p in parts[place:])
        print(f"{part.name}: {part.about} ({left_s:.0f} s)")
        runner = Runner(left_s, device_type=device.type)
        context = Context(device, dry_run, runner, out.resolve() / "traces" / part.name)
        found = _run(part, context)
        name = f"gpu-{part.name}-dry" if dry_run else f"gpu-{part.name}"
        if measured(found["rows"]) or not (out / f"{name}.json").exists():
            write_report(out, name, {"measured": about, **found})
        else:
            print(f"{part.name}: no figures; those of an earlier run stay")
        sections.append((part.name, part.shown(found)))
    print(f"written to {out}")
    for name, section in sections:
        section.show(f"{name}: ")
    save_panels(out / "gpu.png", [panel for _, section in sections for panel in section.panels])


def _run(part: Part, context: Context) -> Row:
    """Return the part's result. An error of its own is a row too, so that the other parts run."""
    try:
        return part.run(context)
    except Exception as error:
        traceback.print_exc()
        return {"rows": {"all": {"failure": f"{type(error).__name__}: {error}"}}}


def provenance(device: torch.device, *, is_dry_run: bool) -> Row:
    """Return date, machine, commit and versions, for the file.

    Raises:
        ValueError: the commit is unknown, and figures of an accelerator need one.
    """
    # Marked where the sources differ.
    described = ("git", "describe", "--always", "--abbrev=12", "--dirty")
    commit = os.environ.get(COMMIT_VARIABLE) or _output(*described)
    if commit is None and not is_dry_run:
        raise ValueError(
            f"the sources lie in no repository: set {COMMIT_VARIABLE} to the commit measured"
        )
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "is_dry_run": is_dry_run,
        "device": "CPU" if device.type == "cpu" else _from_driver("name"),
        "driver": None if device.type == "cpu" else _from_driver("driver_version"),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "host_bytes": memory_limit_bytes(),
        "versions": {name: version(name) for name in PACKAGES},
    }


def _from_driver(what: str) -> str | None:
    """Return a property of the first device from NVIDIA's tool, or None without it.

    torch would take memory on the device for it, as long as the whole program runs.
    """
    said = _output("nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader")
    return None if said is None else said.split("\n")[0].strip()


def _output(*command: str) -> str | None:
    """Return what a command prints, or None where it is missing or fails."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
