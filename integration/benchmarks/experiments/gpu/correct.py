"""Correctness of the engine on an accelerator. Every group of cases runs in fresh processes.

[Note: groups]
engine        every stage against DDP (on one rank the bare model) with torch's fused AdamW, in fp16
              with torch's GradScaler
offload       the same with the optimizer state on the host, at several ratios
comm          stage 3 with zero-comm's collectives against stage 3 without them. Four ranks form two
              nodes, where hpZ must not change a bit

Several ranks share one device through gloo. Where gloo does not support the device, the row says
so. torch's deterministic algorithms are on, because equal computations must give equal bits.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.experiments.gpu.part import Context, Part
from benchmarks.harness.job import QGZ, QWZ
from benchmarks.harness.models import find_device
from benchmarks.harness.ranks import HERE, Place, Row
from benchmarks.harness.report import Column, Section
from benchmarks.harness.rounds import has_figures
from zero_core.testing import Case, compare_with_ddp, read_gaps, run_engine

GROUPS = ("engine 1", "offload 1", "engine 2", "offload 2", "comm 2", "comm 4", "engine 3")
"""Kind of cases and number of ranks of each group. Groups of one rank run first."""
DRY_GROUPS = ("offload 2", "comm 2")

STEPS = 10
COMM_WIDTH = 33
"""Width of the model: large enough for every gradient shard to be quantized."""
BARS = {"fp32": (4e-6, 2e-6), "bf16": (0.07, 0.04), "fp16": (0.0045, 4.5e-4)}
"""Largest allowed difference of a loss (about 3.6) and of a final value, as in the CPU tests. The
bars apply where the order of sums or the kernel differs from the oracle's."""
QUANTIZED_BAR = 0.1
"""Largest allowed relative difference of a loss with quantized collectives. It is twice the largest
difference on the CPU, for a model in which a quantizer's block holds several parameters."""
RANKS_PER_NODE = 2
_HPZ = {"zero_hpz_partition_size": RANKS_PER_NODE}
SMALL_SCALE = {"fp16": {"enabled": True, "hysteresis": 1, "initial_scale_power": 8}}
PARAMETERS_TOO: Mapping[str, Any] = {
    "offload_optimizer": {"device": "cpu", "ratio": 1.0},
    "offload_param": {"device": "cpu"},
}
COLLECTIVES: Mapping[int, Mapping[str, Mapping[str, Any]]] = {
    2: {"qwZ": QWZ, "qgZ": QGZ},
    4: {"hpZ": _HPZ, "all three": {**QWZ, **QGZ, **_HPZ}},
}
"""Quantized collectives by number of ranks: 2 ranks are one node, 4 are two nodes."""


def _run(context: Context) -> Row:
    rows: dict[str, Row] = {}
    for group in DRY_GROUPS if context.is_dry_run else GROUPS:
        print(group, flush=True)
        num_ranks = int(group.partition(" ")[2] or 1)
        arguments = {"group": group, "is_dry_run": context.is_dry_run}
        nodes = (HERE,) * max(1, num_ranks // RANKS_PER_NODE)
        # Only rank 0's rows are used, because all ranks have the same results.
        found = context.runner.start(f"{__name__}:measure", arguments, num_ranks, nodes=nodes)[0]
        for name, row in found.pop("rows", {}).items():
            rows[f"{group}: {name}"] = row
        if found:  # ``found`` now holds the reason why later cases are missing
            rows[group] = found
    return {"rows": rows}


def measure(place: Place, group: str, is_dry_run: bool) -> Row:
    """Run a group on this rank and write each row as soon as it is known."""
    # CUDA requires this variable for deterministic matrix products.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    place.join(find_device(), is_shared=True)
    rows: dict[str, Row] = {}
    for found in _found(place, group.partition(" ")[0], is_dry_run=is_dry_run):
        rows |= found
        place.write({"rows": rows})
    return {"rows": rows}


def _found(place: Place, kind: str, *, is_dry_run: bool) -> Iterator[dict[str, Row]]:
    if kind == "comm":
        yield collectives(place)
        return
    make = offload_cases if kind == "offload" else engine_cases
    for cases in make(is_dry_run=is_dry_run):
        yield with_ddp(cases, place, is_offloaded=kind == "offload")


def with_ddp(cases: list[Case], place: Place, *, is_offloaded: bool) -> dict[str, Row]:
    """Compare losses and values of cases with DDP's. No bit may differ between stages."""
    num_ranks = place.world_size
    compare_with_ddp(place.rank, num_ranks, cases, str(place.folder), STEPS)
    dist.barrier()
    gaps = read_gaps(place.folder, num_ranks)
    dist.barrier()  # no rank may overwrite these files while another still reads them
    rows = {}
    for index, case in enumerate(cases):
        # With two ranks a sum has only one order, and without clipping no norm is summed. In bf16
        # DDP adds gradients of several ranks in 16 bits.
        is_summed = num_ranks > (2 if case.dtype == "fp32" else 1)
        is_exact = not is_summed and not case.clipping and not is_offloaded
        loss_bar, value_bar = (0.0, 0.0) if is_exact else BARS[case.dtype]
        gap = gaps[index]
        is_met = gap.loss <= loss_bar and gap.value <= value_bar and gap.across_stages == 0.0
        bars_of_case = {"bar": loss_bar, "value_bar": value_bar, "is_met": is_met}
        rows[_name(case)] = {"found": gap.loss, **bars_of_case, **gap._asdict()}
    return rows


def collectives(place: Place) -> dict[str, Row]:
    """Compare stage 3 with zero-comm's collectives to stage 3 without them.

    A row's ``found`` is the largest relative difference of a loss. For hpZ, which rounds nothing,
    it is the number of values that differ. Every case must send fewer bytes between nodes if there
    are several nodes.
    """
    case = Case(3, width=COMM_WIDTH)
    plain = run_engine(case, place.rank, STEPS)
    rows = {}
    for name, zero in COLLECTIVES[place.world_size].items():
        trace = run_engine(replace(case, zero=zero), place.rank, STEPS)
        is_exact = name == "hpZ"
        losses = list(zip(trace.losses, plain.losses, strict=True))
        gaps = [abs(a - b) / b for a, b in losses]
        gap = max(gaps) if all(map(math.isfinite, gaps)) else math.inf
        if is_exact:
            values = [(trace.values[name], value) for name, value in plain.values.items()]
            gap = sum(float((a != b).sum()) for a, b in values) + sum(a != b for a, b in losses)
        of_plain = plain.between_nodes_bytes
        sent = trace.between_nodes_bytes / of_plain if of_plain else 0.0
        worst = torch.tensor([gap, sent], dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        gap, sent = worst.tolist()
        bar = 0.0 if is_exact else QUANTIZED_BAR
        # A gap of 0 means that nothing was quantized. Equal bytes mean that nothing was saved.
        is_met = (gap > 0.0) != is_exact and gap <= bar and sent < 1.0
        rows[name] = {"found": gap, "bar": bar, "is_met": is_met, "sent_to_plain": sent}
    return rows


def _name(case: Case) -> str:
    ratio = case.zero.get("offload_optimizer", {}).get("ratio")
    offload = "" if ratio is None else f", ratio {ratio}"
    offload += ", parameters too" if "offload_param" in case.zero else ""
    clip = ", clipped" if case.clipping else ""
    return f"stage {case.stage}, {case.dtype}, {case.accumulation} micro-steps{clip}{offload}"


def engine_cases(*, is_dry_run: bool) -> list[list[Case]]:
    """Return the cases without offload, a list of bit-identical cases for each dtype.

    Some fp16 steps overflow and are skipped.
    """
    grid = itertools.product((1, 3), (0.0, 0.5), (0, 1, 2, 3))
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    if is_dry_run:
        grid, dtypes = itertools.product((1,), (0.0,), (2, 3)), ("fp32", "fp16")
    points = list(grid)
    return [
        [
            Case(stage=stage, dtype=dtype, accumulation=accumulation, clipping=clipping)
            for accumulation, clipping, stage in points
        ]
        for dtype in dtypes
    ]


def offload_cases(*, is_dry_run: bool) -> list[list[Case]]:
    """Return the offloaded cases, a list of bit-identical cases for each dtype and ratio.

    The host updates all elements, none, or a part that ends within a parameter. The lists with
    parameters on the host use ratio 1. Between ratios the device's kernel and the host's may round
    differently.

    Gradients accumulated over micro-steps pass to the host in 16 bits. In fp16 their sum overflows
    before the single gradients do, while torch accumulates in fp32. These cases therefore start
    with a small loss scale.
    """
    ratios = (0.3,) if is_dry_run else (1.0, 0.3, 0.0)
    found = []
    for cases in engine_cases(is_dry_run=is_dry_run):
        cases = [
            replace(case, top=SMALL_SCALE)
            if case.dtype == "fp16" and case.accumulation > 1
            else case
            for case in cases
        ]
        for ratio in ratios:
            zero = {"offload_optimizer": {"device": "cpu", "ratio": ratio}}
            found.append([replace(case, zero=zero) for case in cases if case.stage > 0])
        if not is_dry_run:  # a CPU run has its parameters in host memory anyway
            found.append([replace(case, zero=PARAMETERS_TOO) for case in cases if case.stage == 3])
    return found


def _section(found: Row) -> Section:
    rows: dict[str, Row] = {}
    cases = {name: row for name, row in found["rows"].items() if "found" in row}
    for group in dict.fromkeys(name.partition(":")[0] for name in cases):
        mine = {n: row for n, row in cases.items() if n.partition(":")[0] == group}
        missed = {f"  missed: {n}": row for n, row in mine.items() if not row["is_met"]}
        is_cut = not has_figures(found["rows"].get(group, {}))
        rows[f"{group} (cut off)" if is_cut else group] = {
            "cases": len(mine),
            "met": len(mine) - len(missed),
            "found": max(row["found"] for row in mine.values()),
        }
        rows |= missed
    left_out = {name: row for name, row in found["rows"].items() if not has_figures(row)}
    columns = (
        Column("cases", "cases"),
        Column("met", "met"),
        Column("largest", "found", ".3g"),
        Column("bar", "bar", "g"),
    )
    caption = "the largest difference of a group's cases"
    return Section("correct", {**rows, **left_out}, columns, caption)


PART = Part("correct", "equivalence with DDP and torch's optimizers", 8.0, _run, _section)
