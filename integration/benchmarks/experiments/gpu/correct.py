"""Whether the accelerator computes right: every group of cases in a fresh process.

[Note: groups]
engine        every stage against DDP (one rank: the bare model) with torch's fused AdamW, in fp16
              with its GradScaler
offload       the same with the optimizer's state on the host, at several ratios
comm          quantized collectives: the loss against that of the engine without; four ranks are
              two nodes, hpZ there changes no bit

That no operation is earlier than what it needs, integration/tests/device proves without a device;
that cpu-adam is torch's AdamW, packages/cpu-adam/tests.

Several ranks share one device, by a gloo group that serves it; where that does not work the row
says so. torch computes deterministically here: else the oracle would not repeat its own bits.
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
from benchmarks.harness.models import find_device
from benchmarks.harness.ranks import HERE, Place, Row
from benchmarks.harness.report import Column, Section, bars
from benchmarks.harness.rounds import has_figures
from zero_core.testing import Case, compare_with_ddp, read_gaps, run_engine

GROUPS = (
    "engine 1",
    "offload 1",
    "engine 2",
    "offload 2",
    "comm 2",
    "comm 4",
    "engine 3",
)
"""With the number of ranks. Those of one rank are first."""
DRY_GROUPS = ("offload 2", "comm 2")

STEPS = 10
COMM_WIDTH = 33
"""Of the model: even the shards of its gradients are worth quantizing."""
BARS = {"fp32": (4e-6, 2e-6), "bf16": (0.07, 0.04), "fp16": (0.0045, 4.5e-4)}
"""Of a loss of about 3.6 and of a final value, as in the tests of the CPU, for cases whose
arithmetic is not the oracle's: ranks or a norm summed in another order, a kernel on the host."""
QUANTIZED_BAR = 0.1
"""Of a loss, relative, with quantized collectives: twice the largest difference on the CPU, of a
model so small that every block of a quantizer holds several parameters."""
RANKS_PER_NODE = 2
_QWZ, _QGZ = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
_HPZ = {"zero_hpz_partition_size": RANKS_PER_NODE}
SMALL_SCALE = {"fp16": {"enabled": True, "hysteresis": 1, "initial_scale_power": 8}}
PARAMETERS_TOO: Mapping[str, Any] = {
    "offload_optimizer": {"device": "cpu", "ratio": 1.0},
    "offload_param": {"device": "cpu"},
}
COLLECTIVES: Mapping[int, Mapping[str, Mapping[str, Any]]] = {
    2: {"qwZ": _QWZ, "qgZ": _QGZ},
    4: {"hpZ": _HPZ, "all three": {**_QWZ, **_QGZ, **_HPZ}},
}
"""By ranks: one node, and two."""


def engine_cases(*, is_dry_run: bool) -> list[list[Case]]:
    """Return the cases without offload, a list of equal bits for each dtype.

    Some steps in fp16 overflow and are skipped.
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
    """Return the offloaded cases, a list for each dtype and ratio.

    Ratios are all, none, and a split within a parameter; with all, a list has parameters on the
    host, too.

    Within a list no bit may differ. On an accelerator ratios differ by what its kernel and the
    host's round differently. What is added up over micro-steps is handed on in 16 bits: in fp16 the
    sum overflows before its parts do, which torch adds up in fp32, so there the scale is small.
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
            zero = _offload(ratio=ratio)
            found.append([replace(case, zero=zero) for case in cases if case.stage > 0])
        if not is_dry_run:  # on the CPU parameters lie in host memory as it is
            found.append([replace(case, zero=PARAMETERS_TOO) for case in cases if case.stage == 3])
    return found


def _offload(**keys: Any) -> dict[str, Any]:
    return {"offload_optimizer": {"device": "cpu", **keys}}


def _run(context: Context) -> Row:
    rows: dict[str, Row] = {}
    for group in DRY_GROUPS if context.is_dry_run else GROUPS:
        print(group, flush=True)
        num_ranks = int(group.partition(" ")[2] or 1)
        arguments = {"group": group, "is_dry_run": context.is_dry_run}
        nodes = (HERE,) * max(1, num_ranks // RANKS_PER_NODE)
        # All ranks find the same.
        found = context.runner.start(f"{__name__}:measure", arguments, num_ranks, nodes=nodes)[0]
        for name, row in found.pop("rows", {}).items():
            rows[f"{group}: {name}"] = row
        if found:  # the reason why there is no more
            rows[group] = found
    return {"rows": rows}


def measure(place: Place, group: str, is_dry_run: bool) -> Row:
    """Run a group. Its rows are written as they are found."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # CUDA's condition for the next line
    torch.use_deterministic_algorithms(True)
    rows: dict[str, Row] = {}
    for found in _found(place, group.partition(" ")[0], is_dry_run=is_dry_run):
        rows |= found
        place.write({"rows": rows})
    return {"rows": rows}


def _found(place: Place, kind: str, *, is_dry_run: bool) -> Iterator[dict[str, Row]]:
    torch.set_num_threads(1)
    place.join(find_device(), is_shared=True)
    if kind == "comm":
        yield collectives(place)
        return
    make = offload_cases if kind == "offload" else engine_cases
    for cases in make(is_dry_run=is_dry_run):
        yield with_ddp(cases, place, is_offloaded=kind == "offload")


def with_ddp(cases: list[Case], place: Place, *, is_offloaded: bool) -> dict[str, Row]:
    """Return the losses' distance to DDP's by case, where no bit may differ across stages."""
    num_ranks = place.world_size
    compare_with_ddp(place.rank, num_ranks, cases, str(place.folder), STEPS)
    dist.barrier()
    gaps = read_gaps(place.folder, num_ranks)
    dist.barrier()  # nobody writes the next ones while another still reads
    rows = {}
    for index, case in enumerate(cases):
        # A sum of two has no order, and without clipping there is no norm to add up either. In bf16
        # DDP adds ranks in 16 bits.
        is_summed = num_ranks > (2 if case.dtype == "fp32" else 1)
        is_exact = not is_summed and not case.clipping and not is_offloaded
        loss_bar, value_bar = (0.0, 0.0) if is_exact else BARS[case.dtype]
        gap = gaps[index]
        is_met = gap.loss <= loss_bar and gap.value <= value_bar and gap.across_stages == 0.0
        bars_of_case = {"bar": loss_bar, "value_bar": value_bar, "is_met": is_met}
        rows[_name(case)] = {"found": gap.loss, **bars_of_case, **gap._asdict()}
    return rows


def collectives(place: Place) -> dict[str, Row]:
    """Compare stage 3 with zero-comm's collectives with stage 3 without.

    Found is the largest relative difference of a loss; for hpZ, which rounds nothing, the number of
    values that differ. All have to send less between nodes, where there are some.
    """
    case = Case(3, width=COMM_WIDTH)
    plain = run_engine(case, place.rank, STEPS)
    rows = {}
    for name, zero in COLLECTIVES[place.world_size].items():
        trace = run_engine(replace(case, zero=zero), place.rank, STEPS)
        is_exact = name == "hpZ"
        gaps = [abs(a - b) / b for a, b in zip(trace.losses, plain.losses, strict=True)]
        if is_exact:
            num_losses = sum(a != b for a, b in zip(trace.losses, plain.losses, strict=True))
            values = plain.values.items()
            gap: float = num_losses + sum(int((trace.values[n] != v).sum()) for n, v in values)
        else:
            gap = max(gaps) if all(map(math.isfinite, gaps)) else math.inf
        of_plain = plain.between_nodes_bytes
        sent = trace.between_nodes_bytes / of_plain if of_plain else 0.0
        worst = torch.tensor([gap, sent], dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        gap, sent = worst.tolist()
        bar = 0.0 if is_exact else QUANTIZED_BAR
        # 0 would say that nothing was quantized; as many bytes, that nothing was kept.
        is_met = (gap > 0.0) != is_exact and gap <= bar and sent < 1.0
        rows[name] = {"found": gap, "bar": bar, "is_met": is_met, "sent_to_plain": sent}
    return rows


def _name(case: Case) -> str:
    ratio = case.zero.get("offload_optimizer", {}).get("ratio")
    offload = "" if ratio is None else f", ratio {ratio}"
    offload += ", parameters too" if "offload_param" in case.zero else ""
    clip = ", clipped" if case.clipping else ""
    return f"stage {case.stage}, {case.dtype}, {case.accumulation} micro-steps{clip}{offload}"


def _section(found: Row) -> Section:
    """Return a line per group, and one for every case that misses its bar."""
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
    counted = {name: row for name, row in rows.items() if "cases" in row}
    left_out = {name: row for name, row in found["rows"].items() if not has_figures(row)}
    columns = (
        Column("cases", "cases"),
        Column("met", "met"),
        Column("largest", "found", ".3g"),
        Column("bar", "bar", "g"),
    )
    panels = bars("correct", counted, {"cases": "cases", "met": "met"}, "cases")
    caption = "the largest difference of a group's cases"
    return Section("correct", {**rows, **left_out}, columns, caption, panels=panels)


PART = Part(
    "correct",
    "equivalence with DDP and torch's optimizers",
    8.0,
    _run,
    _section,
)
