"""Correctness and speed of the engine on one accelerator.

[Note: parts]
correct        equivalence with DDP and torch's optimizers at every stage, with and without offload
               and quantized collectives
twin_flow_1b   tokens/s over the offload ratio, 1.3 B parameters, with FSDP2 and DeepSpeed
twin_flow_7b   the same for 6.7 B parameters
roofline       time of an offloaded step over the slowest of device, bus and host
largest        10 B parameters in 32 GiB of device memory and 13 B in 128 GiB of host memory, with
               the measured peak over the planned one
single         the engine without offload against plain torch
quantizers     Triton kernels against copy bandwidth

Each part runs in its own processes and needs no network. ``--dry-run`` runs tiny models on the CPU,
where figures of an accelerator are null.
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

from benchmarks.experiments.gpu import correct, in_memory, offloaded, quantizers
from benchmarks.experiments.gpu.part import Context
from benchmarks.harness.options import RESULTS, of
from benchmarks.harness.ranks import Row, Runner
from benchmarks.harness.report import Section, machine, write_report
from benchmarks.harness.rounds import measured, version
from zero_engine.machine import memory_limit_bytes

PARTS = {
    part.name: part
    for part in (
        *(correct.PART, offloaded.SMALLER, offloaded.LARGER, offloaded.ROOFLINE),
        *(offloaded.LARGEST, in_memory.SINGLE, quantizers.PART),
    )
}
PACKAGES = (
    *("torch", "triton", "deepspeed", "numpy"),
    *("zero-core", "zero-offload", "zero-comm", "cpu-adam", "zero-parts"),
)
COMMIT_VARIABLE = "ZERO_ENGINE_COMMIT"
"""Environment variable with the measured commit, for sources outside a repository."""


def main(
    only: Annotated[list[str] | None, of(PARTS)] = None,
    minutes: Annotated[
        float, typer.Option(min=0, help="Time for everything; what is left then is skipped.")
    ] = 9.0,
    out: Annotated[Path, typer.Option(help="Folder for results and traces.")] = RESULTS,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tiny, on the CPU.")] = False,
) -> None:
    """Measure one accelerator, part by part.

    A part with figures writes ``gpu-PART.json``: date, machine, commit and rows. A dry run writes
    no results.
    """
    parts = [PARTS[name] for name in only or PARTS]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None and not dry_run:
        raise typer.BadParameter(
            "torch finds no accelerator; --dry-run is the same program on the CPU"
        )
    # Only the type, because asking for the device's index would allocate memory on the device.
    device_type = "cpu" if dry_run or accelerator is None else accelerator.type
    about = {} if dry_run else provenance()
    clock = Runner(60 * minutes, device_type=device_type)
    found: dict[str, Row] = {}
    for place, part in enumerate(parts):
        left_s = clock.left_s() * part.share / sum(p.share for p in parts[place:])
        print(f"{part.name}: {part.about} ({left_s:.0f} s)")
        runner = Runner(left_s, device_type=device_type)
        try:
            found[part.name] = part.run(
                Context(dry_run, runner, out.resolve() / "traces" / part.name)
            )
        except Exception as error:  # the remaining parts still run
            traceback.print_exc()
            failure = f"{type(error).__name__}: {error}"
            found[part.name] = {"rows": {"all": {"failure": failure}}}
        # Written after every part, because a later part may be killed.
        if not dry_run and measured(found[part.name]["rows"]):
            write_report(out, f"gpu-{part.name}", {"measured": about, **found[part.name]})
    for part in parts:
        rows = found[part.name]["rows"]
        section = part.section(found[part.name]) if measured(rows) else Section(part.name, rows, ())
        section.show(f"{part.name}: ")


def provenance() -> Row:
    """Return date, machine, commit and versions. Without a commit raises `typer.BadParameter`."""
    given = os.environ.get(COMMIT_VARIABLE)
    commit = given or _output("git", "describe", "--always", "--abbrev=12", "--dirty")
    if commit is None:
        raise typer.BadParameter(
            f"the sources lie in no repository: set {COMMIT_VARIABLE} to the commit measured"
        )
    # The driver's program, because torch would allocate memory on the device for the answer.
    said = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "device_and_driver": said and said.split("\n")[0],
        **machine(),
        "host_bytes": memory_limit_bytes(),
        "versions": {name: version(name) for name in PACKAGES},
    }


def _output(*command: str) -> str | None:
    here = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
