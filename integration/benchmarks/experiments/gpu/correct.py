"""Correctness of the engine on an accelerator. Every group of cases runs in fresh processes.

[Note: groups]
engine        every stage against DDP (on one rank the bare model) with torch's fused AdamW, in fp16
              with torch's GradScaler
offload       the same with the optimizer state on the host, at several ratios
comm          quantized collectives: losses compared with the engine's without them. Four ranks form
              two nodes, where hpZ must not change a bit
delays        results must be bit-identical when random operations on any stream are delayed
host_kernel   cpu-adam on the host against torch's fused AdamW on the device

Several ranks share one device through gloo. Where gloo does not support the device, the row says
so. torch's deterministic algorithms are on, because the oracle must repeat its own bits.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cpu_adam
from benchmarks.experiments.gpu.part import Context, Part
from benchmarks.harness.job import QGZ, QWZ
from benchmarks.harness.models import find_device
from benchmarks.harness.ranks import HERE, Place, Row
from benchmarks.harness.report import Column, Section
from benchmarks.harness.rounds import has_figures
from zero_core.testing import Case, Trace, compare_with_ddp, read_gaps, run_engine

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
"""Groups: kind of cases and number of ranks. Those of one rank run first."""
DRY_GROUPS = ("offload 2", "delays", "comm 2")

STEPS = 10
COMM_WIDTH = 33
"""Width of the model: large enough for every gradient shard to be quantized."""
NUMEL, KERNEL_STEPS = (1 << 20) + 77, 10
KERNEL_RATE = 1e-2
KERNEL_BAR = 2.0
"""Largest allowed difference per step, in units in the last place."""
DELAY_SHARE = 0.2
SEEDS = (1, 2, 3)
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
BUSY_WIDTH = 2048
MOST_PRODUCTS = 40
"""Most matrix products of one delay. A product takes about a millisecond."""
LONGEST_PAUSE_S = 2e-3


def _run(context: Context) -> Row:
    rows: dict[str, Row] = {}
    for group in DRY_GROUPS if context.is_dry_run else GROUPS:
        print(group, flush=True)
        num_ranks = int(group.partition(" ")[2] or 1)
        arguments = {"group": group, "is_dry_run": context.is_dry_run}
        nodes = (HERE,) * max(1, num_ranks // RANKS_PER_NODE)
        # Rank 0's rows stand for all ranks, whose results are equal.
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
    rows: dict[str, Row] = {}
    for found in _found(place, group.partition(" ")[0], is_dry_run=is_dry_run):
        rows |= found
        place.write({"rows": rows})
    return {"rows": rows}


def _found(place: Place, kind: str, *, is_dry_run: bool) -> Iterator[dict[str, Row]]:
    device = find_device()
    if kind == "delays":
        yield from under_delays(device, is_dry_run=is_dry_run)
    elif kind == "host_kernel":
        yield host_kernel(device)
    else:
        torch.set_num_threads(1)
        place.join(device, is_shared=True)
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
        gaps = [abs(a - b) / b for a, b in zip(trace.losses, plain.losses, strict=True)]
        if is_exact:
            gap: float = _num_different(trace, plain)
        else:
            gap = max(gaps) if all(map(math.isfinite, gaps)) else math.inf
        of_plain = plain.between_nodes_bytes
        sent = trace.between_nodes_bytes / of_plain if of_plain else 0.0
        worst = torch.tensor([gap, sent], dtype=torch.float64)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        gap, sent = worst.tolist()
        bar = 0.0 if is_exact else QUANTIZED_BAR
        # A gap of 0 means that nothing was quantized, equal bytes that nothing was saved.
        is_met = (gap > 0.0) != is_exact and gap <= bar and sent < 1.0
        rows[name] = {"found": gap, "bar": bar, "is_met": is_met, "sent_to_plain": sent}
    return rows


def under_delays(device: torch.device, *, is_dry_run: bool) -> Iterator[dict[str, Row]]:
    """Yield per case the number of values that differ from a run without delays.

    Planted races check that the delays can reveal a missing wait.
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


def _name(case: Case) -> str:
    ratio = case.zero.get("offload_optimizer", {}).get("ratio")
    offload = "" if ratio is None else f", ratio {ratio}"
    offload += ", parameters too" if "offload_param" in case.zero else ""
    clip = ", clipped" if case.clipping else ""
    return f"stage {case.stage}, {case.dtype}, {case.accumulation} micro-steps{clip}{offload}"


def _num_different(trace: Trace, plain: Trace) -> int:
    """Return the number of losses and elements of final values that differ in any bit."""
    num_losses = sum(a != b for a, b in zip(trace.losses, plain.losses, strict=True))
    return num_losses + sum(
        int((trace.values[name] != value).sum()) for name, value in plain.values.items()
    )


def _planted_race(place: torch.device, device: torch.device) -> Row:
    """Write a value and read it without waiting. ``found`` is 1 if the read was too early.

    The value is on device ``place``. The delays are those of ``device``.
    """
    value = torch.zeros(1, device=place)
    with delayed(device, seed=0, share=1.0):
        wait = _write_beside(value)
        seen = value.clone()
        wait()
    is_early = int(seen.item() == 0.0)
    return {"found": is_early, "bar": 1, "is_met": is_early == 1}


def _write_beside(value: Tensor) -> Callable[[], None]:
    """Set ``value`` to 1 on another stream, or for a CPU tensor in another thread.

    Return the wait.
    """

    def write() -> None:
        for _ in range(20):  # each write is delayed, so that together they end after the read
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
    """Return the largest difference in fp32 units in the last place of ``b`` or ``start``.

    The unit is that of the larger of the two, because a value that moved close to 0 carries the
    rounding errors of its earlier, larger values.
    """
    size = torch.maximum(b.abs(), start.abs()).clamp(min=KERNEL_RATE)
    spacing = (torch.nextafter(size, torch.tensor(torch.inf)) - size).double()
    return float(((a.double() - b.double()).abs() / spacing).max())


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


def delay_cases(*, is_dry_run: bool) -> dict[str, Case]:
    stages = (3,) if is_dry_run else (1, 2, 3)
    found = {f"stage {stage}": Case(stage=stage, dtype="bf16") for stage in stages}
    ratios = (0.5,) if is_dry_run else (1.0, 0.5)
    for stage, ratio in itertools.product(stages, ratios):
        case = Case(
            stage=stage, dtype="bf16", zero={"offload_optimizer": {"device": "cpu", "ratio": ratio}}
        )
        found[f"stage {stage}, ratio {ratio}"] = case
        # Without this check no step is skipped, and units are updated while backward still runs.
        early = replace(case, top={"check_grad_overflow": False})
        found[f"stage {stage}, ratio {ratio}, in backward"] = early
    if not is_dry_run:
        found["stage 3, parameters too"] = Case(stage=3, dtype="bf16", zero=PARAMETERS_TOO)
    return found


@contextmanager
def delayed(device: torch.device, *, seed: int, share: float) -> Iterator[Callable[[], int]]:
    """Delay a random ``share`` of all operations of this process, drawn from ``seed``.

    Yields a function that returns the number of delayed operations so far.
    """
    lateness = _Lateness(device, seed, share)
    run_thread = threading.Thread.run

    def run(self: threading.Thread) -> None:
        with _Delays(lateness):  # a dispatch mode is active in one thread only
            run_thread(self)

    threading.Thread.run = run  # type: ignore[method-assign]
    try:
        with _Delays(lateness):
            yield lambda: lateness.num_late
    finally:
        threading.Thread.run = run_thread  # type: ignore[method-assign]


class _Lateness:
    """Draws which operations are delayed, and by how much."""

    def __init__(self, device: torch.device, seed: int, share: float) -> None:
        self._random = random.Random(seed)
        self._share = share
        self._busy: Tensor | None = None
        if device.type != "cpu":
            shape = (BUSY_WIDTH, BUSY_WIDTH)
            self._busy = torch.zeros(shape, dtype=torch.bfloat16, device=device)
            self._product = torch.empty_like(self._busy)
            torch.mm(self._busy, self._busy, out=self._product)
            # The product must be complete before other streams use it.
            torch.accelerator.synchronize(device)
        self.num_late = 0

    def maybe_wait(self, *, is_on_host: bool) -> None:
        if self._random.random() >= self._share:
            return
        self.num_late += 1
        if self._busy is None or is_on_host:
            time.sleep(self._random.random() * LONGEST_PAUSE_S)
            return
        for _ in range(self._random.randint(1, MOST_PRODUCTS)):
            # Streams may write ``_product`` concurrently, because all products are zero.
            torch.mm(self._busy, self._busy, out=self._product)


class _Delays(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that delays the operations of one thread."""

    def __init__(self, lateness: _Lateness) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lateness = lateness

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self._lateness.maybe_wait(is_on_host=all(x.device.type == "cpu" for x in tensors))
        return func(*args, **(kwargs or {}))


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


PART = Part(
    *("correct", "equivalence with DDP and torch's optimizers; the same bits under delays"),
    8.0,
    _run,
    _section,
)
