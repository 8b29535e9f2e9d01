"""Training with offload on one device: speed, its bounds, and the largest models.

[Note: speed]
The twin_flow parts train models of OPT's shapes (arXiv 2205.01068, table 1). Every contender
computes in bf16, keeps fp32 states and recomputes blocks and logits in backward. The limit of
device memory applies to every contender. A ratio that does not fit becomes a row with the failure.

[Note: bounds of a step]
device  seconds in which at least one kernel ran, by torch.profiler, in steps after the timed ones
bus     bytes counted by the tier over the measured bandwidth of pinned copies, in the slower
        direction, because a full-duplex bus transfers both directions at once
host    28 bytes per element updated on the host (gradient 2, master weight and two moments in and
        out 24, parameter 2) over the measured bandwidth of a triad
bound   the largest of device, bus and host. A step with perfect overlap takes no longer
idle    time of a step in which no kernel ran

[Note: capacity]
`zero_core.plan` predicts the memory of each job. A job that needs more host memory than is
available is skipped, and its row has the needed and the available bytes. The device limit is
enforced by torch's allocator. Measured peaks of device memory are compared with the plan,
activations included.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from benchmarks.experiments.gpu.part import Context, Part
from benchmarks.harness.job import Job
from benchmarks.harness.memory import GIB, available_bytes
from benchmarks.harness.models import GptShape, find_device
from benchmarks.harness.ranks import Place, Row
from benchmarks.harness.report import MS, Column, Rows, Section
from benchmarks.harness.rounds import quotient, race_on_device, start_on_device
from benchmarks.harness.train import synchronize
from zero_core.errors import ZeroError

PINNED = {"device": "cpu", "pin_memory": True}
RATIOS: tuple[float | str, ...] = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0, "auto")
DEEPSPEED_RATIOS = (0.8, 0.6, 0.4, 0.2)
"""DeepSpeed has these ratios at stage 3 only. They count sub-groups, not elements."""
SETTLING = 80
"""Maximum number of steps after the warm-up in which ``"ratio": "auto"`` may still change."""
PEER_BAR, BEST_GOAL, AUTO_BAR = 2.0, 6.0, 0.95
PEERS = ("fsdp2", "fsdp2, units kept", "deepspeed-2", "deepspeed-3")
"""The peers offload the whole optimizer state, as this engine does at ratio 1."""
SPEED_COLUMNS = (
    Column("tokens/s", "tokens_per_s", ",.0f"),
    Column("ms", "step_s", ".1f", MS),
    Column("host's share", "host_share", ".3f"),
    Column("device GiB", "device_peak_bytes", ".2f", GIB),
    Column("host GiB", "host_peak_bytes", ".2f", GIB),
    Column("loss", lambda row: row["losses"][-1], ".4f"),
)
# At ratio 0 this model's whole optimizer state must fit on the device.
GPT_1_3B = GptShape(layers=24, width=2048, heads=16, vocab=50257, context=1024)
SPEED = Job("", "", GPT_1_3B, micro_batch=4, steps=10, warmup=3, dtype="bf16", stage=2)
BOUND_GOAL, IDLE_BAR = 1.15, 0.1
HOST_BYTES = 28
REPEATS = 8
NUM_TRACED = 3
TRIAD_NUMEL, DRY_TRIAD_NUMEL = 256 * 2**20, 2**20
"""Elements of each array of the host's triad and of each copy over the bus."""
TRIAD_BYTES = 12
"""Bytes moved per element of the triad: one fp32 value read and written, one read."""
BOUND_RATIOS: tuple[float | str, ...] = (1.0, 0.6, "auto")
# Model of DeepSpeed's ZeRO-Offload tutorial, with batch 10 and activation checkpointing.
TUTORIAL = GptShape(layers=50, width=4096, heads=32, vocab=50257, context=1024)
WIDE = GptShape(layers=40, width=5120, heads=40, vocab=50257, context=1024)
DEVICE_LIMIT_BYTES, HOST_LIMIT_BYTES = 32 * GIB, 128 * GIB
PLAN_BAR = 0.05
CAPACITY_COLUMNS = (
    Column("10^9", "num_parameters", ".2f", 1e9),
    Column("s/step", "step_s", ".2f"),
    Column("device", "device_peak_bytes", ".2f", GIB),
    Column("plan", "planned_peak_bytes", ".2f", GIB),
    Column("to plan", "peak_to_plan", ".3f"),
    Column("limit", "device_limit_bytes", ".2f", GIB),
    Column("host", "host_peak_bytes", ".2f", GIB),
    Column("loss", lambda row: f"{row['losses'][0]:.3f} to {row['losses'][-1]:.3f}"),
    Column("skipped", "skipped_steps"),
    Column("", "is_met"),
)


def speed_jobs(first: Job) -> list[Job]:
    def job(name: str, side: str, stage: int, **offload: Any) -> Job:
        return replace(
            first.unchecked(),
            name=name,
            side=side,
            settling=SETTLING if offload.get("ratio") == "auto" else 0,
            stage=stage,
            zero={"offload_optimizer": {**PINNED, **offload}},
        )

    return [
        *(job(f"ratio {ratio}", "zero", first.stage, ratio=ratio) for ratio in RATIOS),
        job("fsdp2", "fsdp2", 3),
        job("fsdp2, units kept", "fsdp2", 2),
        job("deepspeed-2", "deepspeed", 2),
        job("deepspeed-3", "deepspeed", 3),
        *(job(f"deepspeed-3 ratio {r}", "deepspeed", 3, ratio=r) for r in DEEPSPEED_RATIOS),
    ]


def _part(name: str, about: str, first: Job, rounds: Mapping[int, int]) -> Part:
    """Return a part that runs ``rounds[micro_batch]`` rounds with each micro-batch size."""

    def run(context: Context) -> Row:
        rows: dict[str, Row] = {}
        judged: dict[str, Row] = {}
        is_dry = context.is_dry_run
        for micro_batch, num_rounds in ({2: 1} if is_dry else rounds).items():
            jobs = speed_jobs(replace(context.sized(first), micro_batch=micro_batch))
            # Contenders of the most important comparison run first.
            order = ("ratio 0.4", "fsdp2") if is_dry else ("ratio 1.0", *PEERS, "ratio auto")
            known = {job.name: job for job in jobs}
            names = order if is_dry else dict.fromkeys((*order, *known))
            able, found = [], {}
            for job in (known[name] for name in names):
                why = ""
                if job.side == "zero":  # plans exist for this engine only
                    try:
                        # While the engine is built, the host also holds the fp32 model.
                        needed_bytes = job.plan().memory.host_bytes + 4 * job.shape.numel
                        why = why_too_large(needed_bytes)
                    except ZeroError as error:
                        why = str(error)
                if why:
                    found[job.name] = {"skipped": why}
                else:
                    able.append(job)
            print(f"micro-batch {micro_batch}", flush=True)
            found = race_on_device(able, num_rounds, context.runner) | found
            rows |= {f"batch {micro_batch}, {name}": row for name, row in found.items()}
            judged[f"batch {micro_batch}"] = verdicts(found, is_judged=not is_dry)
        return {"device_limit_bytes": first.device_limit_bytes, "rows": rows, "verdicts": judged}

    return Part(name, about, 12.0, run, _section_of_speed)


def verdicts(rows: Rows, *, is_judged: bool = True) -> Row:
    """Return ratios of tokens per second, each with its bar and the contenders not tried.

    A ratio is None if a contender has no figure. It is judged only if every peer has a figure and
    no offload ratio was skipped, for lack of time or host memory. A failed one counts as tried.
    """
    speeds = {name: row["tokens_per_s"] for name, row in rows.items() if "tokens_per_s" in row}
    fixed = [name for name in rows if name.startswith("ratio ") and name != "ratio auto"]
    untried = [name for name in PEERS if name not in speeds]
    untried = sorted(untried + [name for name in fixed if "skipped" in rows[name]])
    peer = max((speeds[name] for name in PEERS if name in speeds), default=None)
    best = max((speeds[name] for name in fixed if name in speeds), default=None)

    def verdict(a: float | None, b: float | None, bar: float) -> Row:
        found = quotient(a, b)
        is_met = found >= bar if is_judged and found is not None and not untried else None
        return {"found": found, "bar": bar, "is_met": is_met, "untried": untried}

    return {
        "ratio 1 to best peer": verdict(speeds.get("ratio 1.0"), peer, PEER_BAR),
        "best ratio to best peer": verdict(best, peer, BEST_GOAL),
        "auto to best ratio": verdict(speeds.get("ratio auto"), best, AUTO_BAR),
    }


def _section_of_speed(found: Row) -> Section:
    def without(verdict: Row) -> str:
        return f", without {', '.join(verdict['untried'])}" if verdict["untried"] else ""

    lines = [
        f"{batch}: {name} {verdict['found']:.2f} (bar {verdict['bar']:g}){without(verdict)}"
        for batch, verdicts_of in found["verdicts"].items()
        for name, verdict in verdicts_of.items()
        if verdict["found"] is not None
    ]
    limit = found["device_limit_bytes"] / 1e9
    title = f"tokens per second, at most {limit:.0f} GB of device memory"
    return Section(title, found["rows"], SPEED_COLUMNS, "\n".join(lines))


_OPT = replace(SPEED, model="checkpointed")
SMALLER = _part(
    *("twin_flow_1b", "1.3 B parameters within 32 GB, over the ratio"),
    replace(
        _OPT,
        shape=GptShape(layers=24, width=2048, heads=32, vocab=50272, context=2048),
        device_limit_bytes=32 * 10**9,
    ),
    rounds={4: 2, 1: 1, 8: 1, 2: 1},
)
LARGER = _part(
    *("twin_flow_7b", "6.7 B parameters within 80 GB, over the ratio"),
    replace(
        _OPT,
        shape=GptShape(layers=32, width=4096, heads=32, vocab=50272, context=2048),
        steps=5,
        device_limit_bytes=76 * 10**9,  # the driver of an 80 GB device needs the other 4 GB
    ),
    rounds={4: 1, 1: 1, 8: 1, 2: 1},
)


def why_too_large(needed_bytes: int) -> str:
    """Return the needed and available memory if the host has too little, or an empty string."""
    there = available_bytes()
    if needed_bytes <= there:
        return ""
    return f"needs {needed_bytes / GIB:.1f} GiB of host memory, {there / GIB:.1f} are available"


def _run_bounds(context: Context) -> Row:
    print("bandwidth", flush=True)
    numel = DRY_TRIAD_NUMEL if context.is_dry_run else TRIAD_NUMEL
    first = context.sized(replace(SPEED, micro_batch=8))
    (bandwidth,) = context.runner.start(f"{__name__}:bandwidth", {"numel": numel})
    rows = {}
    jobs = {job.name: job for job in speed_jobs(first)}
    for ratio in (0.6,) if context.is_dry_run else BOUND_RATIOS:
        job = jobs[f"ratio {ratio}"]
        print(job.name, flush=True)
        row = start_on_device(context.traced(job, NUM_TRACED), context.runner)
        rows[job.name] = {**row, **bounds(row, bandwidth)} if "step_s" in row else row
    return {"bandwidth_bytes_per_s": bandwidth, "goal": BOUND_GOAL, "rows": rows}


def bounds(row: Mapping[str, Any], bandwidth: Mapping[str, Any]) -> Row:
    """Return the figures of [Note: bounds of a step], or the reason why there are none.

    ``bandwidth`` is the result of `bandwidth`, or a row without figures.
    """
    moved, busy_s, step_s = row["moved_bytes"], row["device_busy_s"], row["step_s"]
    pinned = bandwidth.get("pinned")
    if pinned is None or busy_s is None:
        return {"why_null": "this device's kernels or its bus could not be measured"}
    numel = row["host_share"] * row["num_parameters"]
    parts = {
        "device": busy_s,
        "bus": max(moved[f"bytes_{way}"] / pinned[way] for way in ("d2h", "h2d")),
        "host": numel * HOST_BYTES / bandwidth["host"],
    }
    bound = max(parts, key=parts.__getitem__)
    ratio = step_s / parts[bound]
    idle_s = max(0.0, step_s - busy_s)
    # The device must wait where the host or the bus is the slowest. The bar applies to steps that
    # the device bounds, and to the automatically chosen ratio.
    has_bar = bound == "device" or row["ratio_report"] is not None
    return {
        "device_idle_s": idle_s,
        "bus_s": parts["bus"],
        "host_s": parts["host"],
        "bound": bound,
        "step_to_bound": ratio,
        "is_met": ratio <= BOUND_GOAL,
        "idle_share": idle_s / step_s,
        "idle_bar": IDLE_BAR,
        "is_idle_met": idle_s / step_s < IDLE_BAR if has_bar else None,
    }


def bandwidth(place: Place, numel: int) -> Row:
    """Measure the bandwidths of host memory and bus. A target of `benchmarks.harness.ranks`."""
    device = find_device()
    copies = None if device.type == "cpu" else _pinned_copy_bytes_per_s(4 * numel, device)
    # The triad ``a += s * b`` writes in place, as an optimizer does. Every written cache line is
    # also read, so no uncounted line is fetched.
    a, b = torch.ones(numel), torch.ones(numel)
    triad_s = _best_s(lambda: a.add_(b, alpha=1e-6))
    return {"host": numel * TRIAD_BYTES / triad_s, "pinned": copies}


def _pinned_copy_bytes_per_s(num_bytes: int, device: torch.device) -> dict[str, float]:
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def timed(target: torch.Tensor, source: torch.Tensor) -> float:
        def copy() -> None:
            target.copy_(source, non_blocking=True)
            synchronize(device)

        return num_bytes / _best_s(copy)

    return {"d2h": timed(host, there), "h2d": timed(there, host)}


def _best_s(run: Callable[[], object]) -> float:
    """Return the seconds of the fastest call after one untimed call."""
    run()
    # timeit turns the garbage collector off while it measures.
    return min(timeit.repeat(run, number=1, repeat=REPEATS))


def _section_of_bounds(found: Row) -> Section:
    def to_bound(row: Row) -> str | None:
        return f"{row['step_to_bound']:.2f} of {row['bound']}" if "bound" in row else None

    columns = (
        Column("step", "step_s", ".1f", MS),
        Column("device", "device_busy_s", ".1f", MS),
        Column("idle", "device_idle_s", ".1f", MS),
        Column("bus", "bus_s", ".1f", MS),
        Column("host", "host_s", ".1f", MS),
        Column("step to slowest", to_bound),
        Column("", "is_met"),
        Column("idle", "idle_share", ".1%"),
    )
    caption = f"ms; bars: at most {BOUND_GOAL} of the slowest, idle below {IDLE_BAR:.0%}"
    return Section("a step and its bounds", found["rows"], columns, caption)


ROOFLINE = Part(
    *("roofline", "an offloaded step over the slowest of device, bus and host", 5.0),
    _run_bounds,
    _section_of_bounds,
)


def capacity_jobs() -> list[Job]:
    """Return the tutorial's model in bf16, in fp16 and with 8-bit states, and a wider model.

    Their bars are memory and a falling loss, not speed.
    """

    def job(name: str, shape: GptShape = TUTORIAL, dtype: str = "bf16", **offload: Any) -> Job:
        made = Job(
            *(name, "zero", shape, 10, 2, 1),
            model="small_logits",
            is_deferred=True,
            dtype=dtype,
            stage=2,
            zero={"offload_optimizer": {**PINNED, **offload}},
            top={"activation_checkpointing": {}},
            is_repeating=True,
            device_limit_bytes=None if shape is WIDE else DEVICE_LIMIT_BYTES,
        )
        return made if dtype == "fp16" else made.unchecked()

    return [
        job("tutorial, bf16"),
        # A host with too little memory for fp32 states can still run 8-bit states.
        job("tutorial, bf16, int8 states", state_dtype="int8"),
        job("wide, bf16, int8 states", WIDE, state_dtype="int8"),
        job("tutorial, fp16", dtype="fp16"),
    ]


def _row_of_capacity(job: Job, context: Context) -> Row:
    try:
        memory = job.plan().memory  # without activations
    except ZeroError as error:
        return {"failure": str(error)}
    row: Row = {
        "planned_host_bytes": memory.host_bytes,
        "planned_device_bytes": memory.device_bytes,
    }
    print(job.name, flush=True)
    if reason := why_too_large(memory.host_bytes):
        return {**row, "skipped": reason}
    row |= start_on_device(job, context.runner)
    if "losses" not in row:
        return row
    is_narrow = "state_dtype" in job.zero["offload_optimizer"]
    row["is_falling"] = row["losses"][-1] < row["losses"][0]
    is_within = not is_narrow or row["host_peak_bytes"] <= HOST_LIMIT_BYTES
    # The CPU ignores a device limit, so a row there shows nothing about the limit.
    is_limited = job.device_limit_bytes is None or row["device_limit_bytes"] is not None
    row["is_met"] = row["is_falling"] and is_within if is_limited else None
    planned = job.plan(has_activations=True).memory.device_bytes
    row |= {"planned_peak_bytes": planned, "plan_bar": PLAN_BAR}
    if row["device_peak_bytes"] is None:
        return {**row, "why_null": "this device does not tell its peak"}
    ratio = row["device_peak_bytes"] / planned
    return {**row, "peak_to_plan": ratio, "is_plan_met": abs(ratio - 1) <= PLAN_BAR}


def _run_capacity(context: Context) -> Row:
    jobs = map(context.sized, capacity_jobs()[2:3] if context.is_dry_run else capacity_jobs())
    rows = {job.name: _row_of_capacity(job, context) for job in jobs}
    return {"host_limit_bytes": HOST_LIMIT_BYTES, "rows": rows}


def _section_of_capacity(found: Row) -> Section:
    caption = "GiB; met: the loss fell, within the limits; bar of the peak: within 5% of the plan"
    return Section("large models", found["rows"], CAPACITY_COLUMNS, caption)


LARGEST = Part(
    *(
        "largest",
        "10 B parameters within 32 GiB of device memory, 13 B within 128 GiB of the host's",
    ),
    8.0,
    _run_capacity,
    _section_of_capacity,
)
