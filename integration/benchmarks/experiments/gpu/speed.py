"""Tokens per second of an offloaded step over Twin-Flow's ratio, beside FSDP2 and DeepSpeed.

Models of OPT's shapes (arXiv 2205.01068, table 1) in the parts twin_flow. There every side computes
in bf16, keeps states in fp32 and recomputes blocks and logits in backward; torch's allocator may
take no more than the limit, on every side, and a ratio that does not fit is a row that says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from benchmarks.experiments.gpu.capacity import PINNED, no_checks, planned_bytes
from benchmarks.experiments.gpu.part import Context, Part
from benchmarks.experiments.gpu.sizes import DRY, REAL, Sizes
from benchmarks.harness.job import Job
from benchmarks.harness.memory import GIB, available_bytes
from benchmarks.harness.models import GptShape
from benchmarks.harness.ranks import Row
from benchmarks.harness.report import MS, Axes, Column, bars, table_of
from benchmarks.harness.rounds import measured, quotient, race_on_device
from zero_core.errors import ZeroError

RATIOS: tuple[float | str, ...] = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0, "auto")
DEEPSPEED_RATIOS = (0.8, 0.6, 0.4, 0.2)
"""DeepSpeed has them at stage 3 alone. It counts sub-groups, not elements."""
PEER_BAR, BEST_GOAL, AUTO_BAR = 2.0, 6.0, 0.95
PEERS = ("fsdp2", "fsdp2, units kept", "deepspeed-2", "deepspeed-3")
"""They offload everything, as this engine does at ratio 1."""
COLUMNS = (
    Column("tokens/s", "tokens_per_s", ",.0f"),
    Column("ms", "step_s", ".1f", MS),
    Column("host's share", "host_share", ".3f"),
    Column("device GiB", "device_peak_bytes", ".2f", GIB),
    Column("host GiB", "host_peak_bytes", ".2f", GIB),
    Column("loss", lambda row: row["losses"][-1], ".4f"),
)


def speed_jobs(sizes: Sizes) -> list[Job]:
    """Return every contender."""

    def job(name: str, side: str, *, stage: int = sizes.stage, **offload: Any) -> Job:
        return no_checks(
            Job(
                *(name, side, sizes.shape, sizes.micro_batch, sizes.steps, sizes.warmup),
                dtype="bf16",
                settling=sizes.settling if offload.get("ratio") == "auto" else 0,
                stage=stage,
                zero={"offload_optimizer": {**PINNED, **offload}},
            )
        )

    return [
        *(job(f"ratio {ratio}", "zero", ratio=ratio) for ratio in RATIOS),
        job("fsdp2", "fsdp2", stage=3),
        job("fsdp2, units kept", "fsdp2", stage=2),
        job("deepspeed-2", "deepspeed", stage=2),
        job("deepspeed-3", "deepspeed", stage=3),
        *(
            job(f"deepspeed-3 ratio {ratio}", "deepspeed", stage=3, ratio=ratio)
            for ratio in DEEPSPEED_RATIOS
        ),
    ]


def speed(jobs: Sequence[Job], rounds: int, context: Context) -> Row:
    """Return a row per contender: medians over the rounds, or why there are none."""
    rows = race_on_device(jobs, rounds, context.runner, context.console.print)
    return {"rows": rows, "loss_spread": loss_spread(rows)}


def loss_spread(rows: Mapping[str, Row]) -> float | None:
    """Return the largest relative difference of losses at a step between this engine's ratios.

    On the CPU it is 0: there host and device update with the same kernel.
    """
    sides: list[list[float]] = [
        row["losses"] for name, row in measured(rows).items() if name.startswith("ratio ")
    ]
    spreads = [(max(step) - min(step)) / min(step) for step in zip(*sides, strict=False)]
    return max(spreads, default=None)


@dataclass(frozen=True)
class _Model:
    """The model of one part."""

    shape: GptShape
    device_limit_bytes: int
    rounds: Mapping[int, int]
    """By micro-batch, in the order in which they run: the time may end before the last."""
    steps: int


_OPT_1_3B = _Model(
    shape=GptShape(layers=24, width=2048, heads=32, vocab=50272, context=2048),
    device_limit_bytes=32 * 10**9,
    rounds={4: 2, 1: 1, 8: 1, 2: 1},
    steps=10,
)
_OPT_6_7B = _Model(
    shape=GptShape(layers=32, width=4096, heads=32, vocab=50272, context=2048),
    device_limit_bytes=76 * 10**9,  # of a device of 80 GB, beside what its driver keeps
    rounds={4: 1, 1: 1, 8: 1, 2: 1},
    steps=5,
)
_DRY_ROUNDS = {2: 1}
_DRY_CONTENDERS = ("ratio 0.4", "fsdp2")


def _measure(model: _Model, context: Context) -> Row:
    """Return a row per contender and micro-batch, and the verdicts by micro-batch."""
    rows: dict[str, Row] = {}
    judged: dict[str, Row] = {}
    limit, is_dry = model.device_limit_bytes, context.is_dry_run
    for micro_batch, rounds in (_DRY_ROUNDS if is_dry else model.rounds).items():
        sizes = DRY if is_dry else replace(REAL, shape=model.shape, steps=model.steps)
        jobs = [
            replace(job, model="checkpointed", device_limit_bytes=limit)
            for job in _by_interest(speed_jobs(replace(sizes, micro_batch=micro_batch)))
            if not is_dry or job.name in _DRY_CONTENDERS
        ]
        too_large = {job.name: {"skipped": why} for job in jobs if (why := _why_too_large(job))}
        able = [job for job in jobs if job.name not in too_large]
        context.console.print(f"micro-batch {micro_batch}")
        found = speed(able, rounds, context)["rows"] | too_large
        rows |= {f"batch {micro_batch}, {name}": row for name, row in found.items()}
        judged[f"batch {micro_batch}"] = verdicts(found, is_judged=not is_dry)
    return {"device_limit_bytes": limit, "rows": rows, "verdicts": judged}


def _by_interest(jobs: Iterable[Job]) -> list[Job]:
    """Return the two ends of the comparison first, as the time may end before the last."""
    first = ("ratio 1.0", *PEERS, "ratio auto")
    return sorted(jobs, key=lambda job: first.index(job.name) if job.name in first else len(first))


def _why_too_large(job: Job) -> str:
    """Return both numbers, if the host cannot hold this engine's job. Peers have no plan."""
    if job.side != "zero":
        return ""
    try:
        # The model itself lies on the host while it is built.
        needed = planned_bytes(job)["planned_host_bytes"] + 4 * job.shape.numel
    except ZeroError as error:
        return str(error)
    there = available_bytes()
    if needed <= there:
        return ""
    return f"needs {needed / GIB:.1f} GiB of host memory, {there / GIB:.1f} are available"


def verdicts(rows: Mapping[str, Row], *, is_judged: bool = True) -> Row:
    """Return ratios of tokens per second, each with its bar and the missing contenders.

    Null where a side has no figure, and not judged unless every peer and every fixed ratio has been
    tried: a ratio that did not fit was, one after the end of the time was not.

    Args:
        rows: of one micro-batch, by contender.
        is_judged: whether bars apply: not on the CPU.
    """
    speeds = {name: row["tokens_per_s"] for name, row in rows.items() if "tokens_per_s" in row}
    untried = sorted(
        [name for name in PEERS if name not in speeds]
        + [name for name, row in rows.items() if _is_fixed(name) and "skipped" in row]
    )
    peer = max((speeds[name] for name in PEERS if name in speeds), default=None)
    best = max((speed for name, speed in speeds.items() if _is_fixed(name)), default=None)

    def verdict(a: float | None, b: float | None, bar: float) -> Row:
        found = quotient(a, b)
        is_met = found >= bar if is_judged and found is not None and not untried else None
        return {"found": found, "bar": bar, "is_met": is_met, "untried": untried}

    return {
        "ratio 1 to best peer": verdict(speeds.get("ratio 1.0"), peer, PEER_BAR),
        "best ratio to best peer": verdict(best, peer, BEST_GOAL),
        "auto to best ratio": verdict(speeds.get("ratio auto"), best, AUTO_BAR),
    }


def _is_fixed(name: str) -> bool:
    return name.startswith("ratio ") and name != "ratio auto"


def table(found: Mapping[str, Any]) -> Table:
    """Return the table of a result of `speed`."""
    return table_of(found["rows"], COLUMNS, title="speed", caption="medians over rounds")


def _table(found: Mapping[str, Any]) -> Table:
    limit = found["device_limit_bytes"] / 1e9
    lines = [
        f"{batch}: {name} {verdict['found']:.2f} (bar {verdict['bar']:g}){_without(verdict)}"
        for batch, verdicts_of in found["verdicts"].items()
        for name, verdict in verdicts_of.items()
        if verdict["found"] is not None
    ]
    title = f"tokens per second, at most {limit:.0f} GB of device memory"
    return table_of(found["rows"], COLUMNS, title=title, caption="\n".join(lines))


def _without(verdict: Row) -> str:
    return f", without {', '.join(verdict['untried'])}" if verdict["untried"] else ""


def draw(axes: Axes, found: Mapping[str, Any]) -> None:
    """Draw tokens per second as bars, this engine's ratios in green."""
    speeds = {name: row["tokens_per_s"] for name, row in measured(found["rows"]).items()}

    def is_ours(name: str) -> bool:
        return name.rpartition(", ")[2].startswith("ratio")

    bars(axes, speeds, "tokens per second", ours=is_ours)


def _part(name: str, about: str, model: _Model) -> Part:
    def run(context: Context) -> Row:
        return _measure(model, context)

    return Part(name=name, about=about, share=12.0, run=run, table=_table, draw=draw)


SMALLER = _part("twin_flow_1b", "1.3 B parameters within 32 GB, over the ratio", _OPT_1_3B)
LARGER = _part("twin_flow_7b", "6.7 B parameters within 80 GB, over the ratio", _OPT_6_7B)
