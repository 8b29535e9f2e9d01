"""Whether the accelerator computes right: every group of cases in a fresh process.

[Note: groups]
engine        every stage against DDP (one rank: the bare model) with torch's fused AdamW, in fp16
              with its GradScaler
offload       the same with the optimizer's state on the host, at several ratios
comm          quantized collectives: the loss against that of the engine without; four ranks are
              two nodes, hpZ there changes no bit
delays        the same bits when operations on any stream are late at random
host_kernel   cpu-adam on the host against torch's fused AdamW on the device

Several ranks share one device, by a gloo group that serves it; where that does not work the row
says so. torch computes deterministically here: else the oracle would not repeat its own bits.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

import cpu_adam
from benchmarks.experiments.gpu.correct.cases import (
    BARS,
    COLLECTIVES,
    QUANTIZED_BAR,
    RANKS_PER_NODE,
    delay_cases,
    engine_cases,
    offload_cases,
)
from benchmarks.experiments.gpu.correct.delays import delayed
from benchmarks.experiments.gpu.part import Context, Part
from benchmarks.harness.models import find_device
from benchmarks.harness.ranks import Place, Row
from benchmarks.harness.report import Axes, empty_table
from zero_core.testing import (
    Case,
    Trace,
    compare_with_ddp,
    preload,
    read_gaps,
    run_engine,
    spawn,
)

GROUPS = (
    "engine 1",
    "offload 1",
    "delays",
    "host_kernel",
    "engine 2",
    "offload 2",
    "comm 2",
    "comm 4",
    "engine 3",
)
"""With the number of ranks. Those of one rank are first."""
DRY_GROUPS = ("offload 2", "delays", "comm 4")


STEPS = 10
COMM_WIDTH = 33
"""Of the model: even the shards of its gradients are worth quantizing."""
NUMEL, KERNEL_STEPS = (1 << 20) + 77, 10
KERNEL_RATE = 1e-2
KERNEL_BAR = 2.0
"""Units in the last place, per step."""
DELAY_SHARE = 0.2
SEEDS = (1, 2, 3)


def _run(context: Context) -> Row:
    rows: dict[str, Row] = {}
    for group in DRY_GROUPS if context.is_dry_run else GROUPS:
        context.console.print(group)
        found = context.runner.start(
            f"{__name__}:measure", group=group, is_dry_run=context.is_dry_run
        )
        for name, row in found.pop("rows", {}).items():
            rows[f"{group}: {name}"] = row
        if found:  # the reason why there is no more
            rows[group] = found
    return {"rows": rows}


def measure(place: Place, group: str, is_dry_run: bool) -> Row:
    """Run a group. Its rows are written as they are found."""
    preload("cpu_adam", "zero_offload", "zero_comm")
    rows: dict[str, Row] = {}
    for found in _group(group, is_dry_run=is_dry_run):
        rows |= found
        place.write({"rows": rows})
    return {"rows": rows}


def with_ddp(
    cases: list[Case], num_ranks: int, backend: str, *, is_offloaded: bool
) -> dict[str, Row]:
    """Return the losses' distance to DDP's by case, where no bit may differ across stages."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_compare, num_ranks, cases, folder, STEPS, backend=backend)
        gaps = read_gaps(folder, num_ranks)
    rows = {}
    for index, case in enumerate(cases):
        # A sum of two has no order, and without clipping there is no norm to add up either. In bf16
        # DDP adds ranks in 16 bits.
        is_summed = num_ranks > (2 if case.dtype == "fp32" else 1)
        is_exact = not is_summed and not case.clipping and not is_offloaded
        loss_bar, value_bar = (0.0, 0.0) if is_exact else BARS[case.dtype]
        gap = gaps[index]
        is_met = gap.loss <= loss_bar and gap.value <= value_bar and gap.across_stages == 0.0
        rows[_name(case)] = {
            "found": gap.loss,
            "bar": loss_bar,
            "value_bar": value_bar,
            "is_met": is_met,
            **asdict(gap),
        }
    return rows


def collectives(num_ranks: int, backend: str) -> dict[str, Row]:
    """Compare stage 3 with zero-comm's collectives with stage 3 without.

    Found is the largest relative difference of a loss; for hpZ, which rounds nothing, the number of
    values that differ. All have to send less between nodes, where there are some.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(
            _train_with_collectives,
            num_ranks,
            folder,
            ranks_per_node=RANKS_PER_NODE,
            backend=backend,
        )
        found = [
            json.loads(Path(folder, f"{rank}.json").read_text(encoding="utf-8"))
            for rank in range(num_ranks)
        ]
    rows = {}
    for name in COLLECTIVES[num_ranks]:
        sent = max(of_rank[name]["sent_to_plain"] for of_rank in found)
        if name == "hpZ":
            gap, bar = max(of_rank[name]["num_different"] for of_rank in found), 0.0
        else:
            gap, bar = max(of_rank[name]["loss"] for of_rank in found), QUANTIZED_BAR
        # 0 would say that nothing was quantized; as many bytes, that nothing was kept.
        is_met = (gap > 0.0) == (name != "hpZ") and gap <= bar and sent < 1.0
        rows[name] = {"found": gap, "bar": bar, "is_met": is_met, "sent_to_plain": sent}
    return rows


def under_delays(device: torch.device, *, is_dry_run: bool) -> Iterator[dict[str, Row]]:
    """Yield the number of values per case that differ from those of a run without delays.

    One case plants a race, which the delays have to show.
    """
    yield {"a planted race of threads": _planted_race(torch.device("cpu"), device)}
    if device.type != "cpu":
        yield {"a planted race of streams": _planted_race(device, device)}
    for name, case in delay_cases(is_dry_run=is_dry_run).items():
        plain = run_engine(case, 0, STEPS)
        worst, num_late = 0, 0
        for seed in SEEDS[:1] if is_dry_run else SEEDS:
            with delayed(device, seed=seed, share=DELAY_SHARE) as late:
                worst = max(worst, _num_different(run_engine(case, 0, STEPS), plain))
            num_late += late()
        is_met = worst == 0 and num_late > 0
        yield {name: {"found": worst, "bar": 0, "is_met": is_met, "num_late": num_late}}


def host_kernel(device: torch.device) -> dict[str, Row]:
    """Compare cpu-adam on the host with torch's fused AdamW on the device, from equal values."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(NUMEL, generator=generator)
    grads = [torch.randn(NUMEL, generator=generator) for _ in range(KERNEL_STEPS)]
    hyper: dict[str, Any] = {"lr": KERNEL_RATE, "eps": 1e-8, "weight_decay": 0.1}
    there = torch.nn.Parameter(start.to(device))
    optimizer = torch.optim.AdamW([there], fused=True, betas=(0.9, 0.95), **hyper)
    here = torch.nn.Parameter(start.clone())
    host = cpu_adam.CPUAdam([here], betas=(0.9, 0.95), **hyper)
    for grad in grads:
        there.grad, here.grad = grad.to(device), grad.clone()
        optimizer.step()
        host.step()
    ulps = _ulps(here.detach(), there.detach().cpu(), start)
    bar = KERNEL_BAR * KERNEL_STEPS
    return {f"{KERNEL_STEPS} steps": {"found": ulps, "bar": bar, "is_met": ulps <= bar}}


def _compare(rank: int, world_size: int, cases: list[Case], folder: str, steps: int) -> None:
    _be_deterministic()
    compare_with_ddp(rank, world_size, cases, folder, steps)


def _train_with_collectives(rank: int, world_size: int, folder: str) -> None:
    _be_deterministic()
    case = Case(3, width=COMM_WIDTH)
    plain = run_engine(case, rank, STEPS)
    found = {}
    for name, zero in COLLECTIVES[world_size].items():
        trace = run_engine(replace(case, zero=zero), rank, STEPS)
        gaps = [abs(a - b) / b for a, b in zip(trace.losses, plain.losses, strict=True)]
        is_finite = all(math.isfinite(gap) for gap in gaps)
        sent, of_plain = trace.between_nodes_bytes, plain.between_nodes_bytes
        found[name] = {
            "loss": max(gaps) if is_finite else math.inf,
            "num_different": _num_different(trace, plain),
            "sent_to_plain": sent / of_plain if of_plain else 0.0,
        }
    Path(folder, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def _be_deterministic() -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # CUDA's condition for it
    torch.use_deterministic_algorithms(True)


def _name(case: Case) -> str:
    ratio = case.zero.get("offload_optimizer", {}).get("ratio")
    offload = "" if ratio is None else f", ratio {ratio}"
    offload += ", parameters too" if "offload_param" in case.zero else ""
    clip = ", clipped" if case.clipping else ""
    return f"stage {case.stage}, {case.dtype}, {case.accumulation} micro-steps{clip}{offload}"


def _num_different(trace: Trace, plain: Trace) -> int:
    """Return the number of losses and elements of final values that differ in a bit."""
    num_losses = sum(a != b for a, b in zip(trace.losses, plain.losses, strict=True))
    return num_losses + sum(
        int((trace.values[name] != value).sum()) for name, value in plain.values.items()
    )


def _planted_race(place: torch.device, device: torch.device) -> Row:
    """Write a value and read it without waiting: found is 1 if the read was too early.

    The value lies at ``place``; the delays are those of ``device``.
    """
    value = torch.zeros(1, device=place)
    with delayed(device, seed=0, share=1.0):
        wait = _write_beside(value)
        seen = value.clone()
        wait()
    is_early = int(seen.item() == 0.0)
    return {"found": is_early, "bar": 1, "is_met": is_early == 1}


def _write_beside(value: Tensor) -> Callable[[], None]:
    """Set ``value`` to 1 on a stream of its own, on a host in a thread of its own."""

    def write() -> None:
        for _ in range(20):  # each of them late: all together later than the reader
            value.fill_(0.0)
        value.fill_(1.0)

    if value.device.type == "cpu":
        thread = threading.Thread(target=write)
        thread.start()
        return thread.join
    stream = torch.Stream(value.device)
    torch.accelerator.synchronize(value.device)
    with stream:
        write()
    return stream.synchronize


def _ulps(a: Tensor, b: Tensor, start: Tensor) -> float:
    """Return the largest difference in units in the last place (fp32) of ``b`` or ``start``.

    The larger of the two: a value that moved close to 0 has the rounding of those before.
    """
    size = torch.maximum(b.abs(), start.abs()).clamp(min=KERNEL_RATE)
    spacing = (torch.nextafter(size, torch.tensor(torch.inf)) - size).double()
    return float(((a.double() - b.double()).abs() / spacing).max())


def _group(name: str, *, is_dry_run: bool) -> Iterator[dict[str, Row]]:
    device = find_device()
    backend = "cpu:gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:gloo"
    kind, _, ranks = name.partition(" ")
    if kind == "engine":
        for cases in engine_cases(is_dry_run=is_dry_run):
            yield with_ddp(cases, int(ranks), backend, is_offloaded=False)
    elif kind == "offload":
        for cases in offload_cases(is_dry_run=is_dry_run):
            yield with_ddp(cases, int(ranks), backend, is_offloaded=True)
    elif kind == "comm":
        yield collectives(int(ranks), backend)
    else:
        _be_deterministic()
        if kind == "delays":
            yield from under_delays(device, is_dry_run=is_dry_run)
        else:
            yield host_kernel(device)


def _table(found: Mapping[str, Any]) -> Table:
    """Return a line per group, and one for every case that misses its bar."""
    caption = "the largest difference of a group's cases"
    table = empty_table(("", "cases", "met", "largest"), title="correct", caption=caption)
    measured = {name: row for name, row in found["rows"].items() if "found" in row}
    for group in dict.fromkeys(name.partition(":")[0] for name in measured):
        rows = {n: row for n, row in measured.items() if n.partition(":")[0] == group}
        num_met = sum(row["is_met"] for row in rows.values())
        largest = max(row["found"] for row in rows.values())
        is_cut = {"failure", "skipped"} & set(found["rows"].get(group, {}))
        label = f"{group} (cut off)" if is_cut else group
        table.add_row(label, str(len(rows)), str(num_met), f"{largest:.2g}")
        for name, row in rows.items():
            if not row["is_met"]:
                table.add_row(f"  missed: {name}", "", f"bar {row['bar']:g}", f"{row['found']:.3g}")
    return table


def _draw(axes: Axes, found: Mapping[str, Any]) -> None:
    """Draw the number of cases of each group that met their bar."""
    measured = {name: row for name, row in found["rows"].items() if "found" in row}
    groups = list(dict.fromkeys(name.partition(":")[0] for name in measured))
    for is_met, color in ((True, "tab:green"), (False, "tab:red")):
        counts = [
            sum(row["is_met"] is is_met for n, row in measured.items() if n.partition(":")[0] == g)
            for g in groups
        ]
        axes.scatter(counts, groups, color=color, label="met" if is_met else "missed")
    axes.invert_yaxis()
    axes.set_xlabel("cases")
    axes.legend()


PART = Part(
    name="correct",
    about="equivalence with DDP and torch's optimizers; the same bits under delays",
    share=8.0,
    run=_run,
    table=_table,
    draw=_draw,
)
