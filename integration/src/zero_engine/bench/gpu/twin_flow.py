"""Tokens per second over Twin-Flow's ratio, beside FSDP2 and DeepSpeed, under a device's limit.

Models of OPT's shapes (arXiv 2205.01068, table 1). Every side computes in bf16, keeps states in
fp32 and computes blocks and logits again in backward; torch's allocator may take no more than the
limit, on every side, and a ratio that does not fit is a row that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.axes import Axes
from rich.table import Table

from zero_core.errors import ZeroError
from zero_engine.bench.gpt import GptShape
from zero_engine.bench.gpu.part import Context, Part, Row
from zero_engine.bench.gpu.tables import draw_speeds, table_of_steps
from zero_engine.bench.offload_cuda.capacity import planned_bytes
from zero_engine.bench.offload_cuda.host_memory import available_bytes
from zero_engine.bench.offload_cuda.jobs import Job
from zero_engine.bench.offload_cuda.settings import DRY, GIB, REAL, Settings
from zero_engine.bench.offload_cuda.speed import speed, speed_jobs

__all__ = ["LARGER", "SMALLER", "verdicts"]

PEER_BAR, BEST_GOAL, AUTO_BAR = 2.0, 6.0, 0.95
PEERS = ("fsdp2", "fsdp2, units kept", "deepspeed-2", "deepspeed-3")
"""Who offloads everything, as this engine does at ratio 1."""


@dataclass(frozen=True)
class _Model:
    """What one part measures."""

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
_DRY_BATCHES = {2: 1}
_DRY_CONTENDERS = ("ratio 0.4", "fsdp2")


def _settings(model: _Model, micro_batch: int, *, is_dry_run: bool) -> Settings:
    if is_dry_run:
        return replace(DRY, micro_batch=micro_batch)
    return replace(
        REAL,
        shape=model.shape,
        micro_batch=micro_batch,
        steps=model.steps,
        rounds=model.rounds[micro_batch],
        device_limit_bytes=model.device_limit_bytes,
    )


def _measure(model: _Model, context: Context) -> Row:
    """A row per contender and micro-batch; what they come to, by micro-batch."""
    rows: dict[str, Row] = {}
    judged: dict[str, Row] = {}
    for micro_batch in _DRY_BATCHES if context.is_dry_run else model.rounds:
        settings = _settings(model, micro_batch, is_dry_run=context.is_dry_run)
        jobs = [
            replace(job, is_lean=True, device_limit_bytes=settings.device_limit_bytes)
            for job in _by_interest(speed_jobs(settings))
            if not context.is_dry_run or job.name in _DRY_CONTENDERS
        ]
        too_large = {job.name: why for job in jobs if (why := _why_too_large(job))}
        able = [job for job in jobs if job.name not in too_large]
        context.console.print(f"micro-batch {micro_batch}")
        found = speed(able, settings, context.runner, context.console)["rows"]
        found |= {name: {"skipped": why} for name, why in too_large.items()}
        rows |= {f"batch {micro_batch}, {name}": row for name, row in found.items()}
        judged[f"batch {micro_batch}"] = verdicts(found, is_judged=not context.is_dry_run)
    return {"device_limit_bytes": model.device_limit_bytes, "rows": rows, "verdicts": judged}


def _by_interest(jobs: Iterable[Job]) -> list[Job]:
    """The two ends of what is compared come first, as the time may end before the last."""
    first = ("ratio 1.0", *PEERS, "ratio auto")
    return sorted(jobs, key=lambda job: first.index(job.name) if job.name in first else len(first))


def _why_too_large(job: Job) -> str:
    """Of a job of this engine: both numbers, if the host cannot hold it. Peers have no plan."""
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
    """Ratios of tokens per second, each with its bar, and with who was missing.

    Null where a side has no figure, and not judged unless every peer and every fixed ratio has been
    tried: a ratio that did not fit was, one for which the time was over was not.

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
        quotient = None if a is None or b is None else a / b
        is_met = quotient >= bar if is_judged and quotient is not None and not untried else None
        return {"found": quotient, "bar": bar, "is_met": is_met, "untried": untried}

    return {
        "ratio 1 to best peer": verdict(speeds.get("ratio 1.0"), peer, PEER_BAR),
        "best ratio to best peer": verdict(best, peer, BEST_GOAL),
        "auto to best ratio": verdict(speeds.get("ratio auto"), best, AUTO_BAR),
    }


def _is_fixed(name: str) -> bool:
    return name.startswith("ratio ") and name != "ratio auto"


def _table(found: Mapping[str, Any]) -> Table:
    limit = found["device_limit_bytes"] / 1e9
    lines = [
        f"{batch}: {name} {verdict['found']:.2f} (bar {verdict['bar']:g}){_without(verdict)}"
        for batch, verdicts_of in found["verdicts"].items()
        for name, verdict in verdicts_of.items()
        if verdict["found"] is not None
    ]
    return table_of_steps(
        found,
        _cells,
        ("tokens/s", "ms", "host's share", "device GiB", "host GiB"),
        title=f"tokens per second, at most {limit:.0f} GB of device memory",
        caption="\n".join(lines),
    )


def _without(verdict: Row) -> str:
    return f", without {', '.join(verdict['untried'])}" if verdict["untried"] else ""


def _cells(row: Row) -> Iterable[str]:
    share, device = row["host_share"], row["device_peak_bytes"]
    yield f"{row['tokens_per_s']:,.0f}"
    yield f"{row['step_s'] * 1e3:.1f}"
    yield "" if share is None else f"{share:.3f}"
    yield "" if device is None else f"{device / GIB:.1f}"
    yield f"{row['host_peak_bytes'] / GIB:.1f}"


def _draw(axes: Axes, found: Mapping[str, Any]) -> None:
    draw_speeds(axes, found, ours=", ratio")


def _part(name: str, about: str, model: _Model) -> Part:
    run: Callable[[Context], Row] = lambda context: _measure(model, context)  # noqa: E731
    return Part(name=name, about=about, share=12.0, run=run, table=_table, draw=_draw)


SMALLER = _part("twin_flow_1b", "1.3 B parameters within 32 GB, over the ratio", _OPT_1_3B)
LARGER = _part("twin_flow_7b", "6.7 B parameters within 80 GB, over the ratio", _OPT_6_7B)
