"""The Triton kernels of the block quantizer against copy bandwidth, on one accelerator.

[Note: figures]
Each row is one operation (encode; decode; decode_sum of 8 rows), kind, dtype and size. Its
**moved** bytes are those that it must read and write, in closed form. A device-to-device copy that
moves as many is timed in the same rounds, in turns with the Triton kernel and with the plain torch
backend on the device. **share** is the copy's time over the kernel's: the kernel's bandwidth as a
share of copy bandwidth. The bar, 0.8, is for sizes of 64 Mi elements and more, which no cache
holds. Before it is timed, each result is compared with the torch backend's on the host; a kernel
that gives another ends the run.

Needs one accelerator that Triton serves. ``--dry-run`` is the same program, tiny, on the CPU, in
Triton's interpreter, or with the torch backend alone where triton isn't installed. There, figures
of an accelerator are null.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from benchmarks.experiments.comm_cuda.kernels import (
    BAR,
    BAR_NUMEL,
    DRY,
    KINDS,
    MI,
    REAL,
    Stopwatch,
    interpreted,
    jobs,
    measure,
    on_device,
)
from benchmarks.harness.models import find_device
from benchmarks.harness.options import RESULTS, DryRun, Output, choose, find_device_type
from benchmarks.harness.ranks import Row, write_json
from benchmarks.harness.report import Axes, Column, empty_table, machine, markdown, save_panels

COLUMNS = (
    Column("kind", "kind"),
    Column("dtype", "dtype"),
    Column("elements", lambda row: _numel(row["numel"])),
    Column("µs", lambda row: row["median_s"][row["backend"]], ".1f", 1e-6),
    Column("GB/s", "bytes_per_s", ".0f", 1e9),
    Column("of copy", "share", ".2f"),
    Column("torch / it", "times_torch", ".1f"),
    Column("bar", "is_met"),
)


def main(
    kind: Annotated[
        list[str] | None, typer.Option(help=f"Kinds, of: {', '.join(KINDS)}; all.")
    ] = None,
    largest_mi: Annotated[
        int, typer.Option(min=1, help="No tensors of more than so many Mi elements.")
    ] = 256,
    rounds: Annotated[int | None, typer.Option(min=1, help=f"{REAL.rounds}.")] = None,
    dry_run: DryRun = False,
    output: Output = RESULTS,
) -> None:
    """Measure and write ``comm_cuda.json`` after each row, then ``comm_cuda.md`` and ``.png``."""
    kinds = choose(kind, KINDS, "kind", "--kind")
    settings = DRY if dry_run else REAL
    settings = replace(
        settings,
        kinds=tuple(kinds),
        numels=tuple(numel for numel in settings.numels if numel <= largest_mi * MI),
        rounds=rounds or settings.rounds,
    )
    find_device_type(is_dry_run=dry_run)
    device = torch.device("cpu") if dry_run else find_device()
    try:
        backend = interpreted() if dry_run else on_device(device)
    except LookupError as error:
        raise typer.BadParameter(str(error)) from error
    print(f"{backend.name} backend on {_describe(device)}", flush=True)
    output.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    has_triton = importlib.util.find_spec("triton") is not None
    triton = importlib.metadata.version("triton") if has_triton else None
    report = {
        "is_dry_run": dry_run,
        "is_interpreted": dry_run and backend.name == "triton",
        "settings": asdict(settings),
        "machine": {"device": _describe(device), **machine(), "triton": triton},
        "rows": rows,
    }
    stopwatch = Stopwatch(device)
    for job in jobs(settings, device):
        rows.append(measure(job, backend, settings, stopwatch, device))
        write_json(output / "comm_cuda.json", report)
    text = f"{markdown(table(rows))}\n{verdict(rows)}\n"
    (output / "comm_cuda.md").write_text(text, encoding="utf-8")
    save_picture(rows, output / "comm_cuda.png")
    print(f"written to {output}\n\n{text}", end="")


def _describe(device: torch.device) -> str:
    if device.type == "cpu":
        return "the CPU, for a dry run: its times say nothing of a GPU"
    return f"{device} ({torch.get_device_module(device).get_device_name(device)})"


def table(rows: Sequence[Row]) -> Table:
    """Return a line per row, with empty cells for figures that this device does not have."""
    headings = ["operation", *(column.heading for column in COLUMNS)]
    found = empty_table(headings, title="quantizer kernels", num_names=3)
    for row in rows:
        found.add_row(row["operation"], *(column.cell(row) for column in COLUMNS))
    return found


def verdict(rows: Sequence[Row]) -> str:
    """Return one sentence on the bar."""
    judged = [row for row in rows if row["is_met"] is not None]
    if not judged:
        return (
            f"the bar, {BAR:.0%} of copy bandwidth, is for {BAR_NUMEL // MI} Mi elements and more"
        )
    num_met = sum(row["is_met"] for row in judged)
    worst = min(judged, key=lambda row: float(row["share"]))
    return (
        f"{num_met} of {len(judged)} at {BAR:.0%} of copy bandwidth or more; the least is "
        f"{worst['share']:.0%}: {worst['operation']}, {worst['kind']}, {worst['dtype']}, "
        f"{_numel(worst['numel'])} elements"
    )


def _numel(numel: int) -> str:
    return f"{numel // MI} Mi" if numel % MI == 0 else f"{numel}"


def save_picture(rows: Sequence[Row], path: Path) -> None:
    """Draw the share of copy bandwidth over size, or seconds where there is no share."""
    by_operation: dict[str, list[Row]] = {}
    for row in rows:
        by_operation.setdefault(row["operation"], []).append(row)
    panels = [
        (operation, 13, lambda axes, found=found: _draw(axes, found))
        for operation, found in by_operation.items()
    ]
    save_panels(path, panels, columns=len(panels))


def _draw(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    has_share = any(row["share"] is not None for row in rows)
    for kind, dtype in dict.fromkeys((row["kind"], row["dtype"]) for row in rows):
        line = [row for row in rows if (row["kind"], row["dtype"]) == (kind, dtype)]
        ys = [row["share"] if has_share else row["median_s"][row["backend"]] for row in line]
        style = "-" if dtype == "bf16" else "--"
        axes.plot([row["numel"] for row in line], ys, style, marker="o", label=f"{kind} {dtype}")
    if has_share:
        axes.axhline(BAR, color="black", linewidth=0.8)
        axes.set_ylim(bottom=0)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("elements")
    axes.set_ylabel("share of copy bandwidth" if has_share else "seconds")
    axes.legend(fontsize="small")
