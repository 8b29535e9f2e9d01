"""Tokens per second of an offloaded step over Twin-Flow's ratio, beside FSDP2 and DeepSpeed.

Models of OPT's shapes (arXiv 2205.01068, table 1) in the parts twin_flow. There every side computes
in bf16, keeps states in fp32 and recomputes blocks and logits in backward; torch's allocator may
take no more than the limit, on every side, and a ratio that does not fit is a row that says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.experiments.gpu.capacity import PINNED, why_too_large
from benchmarks.experiments.gpu.part import Context, Part
from benchmarks.harness.job import Job
from benchmarks.harness.memory import GIB
from benchmarks.harness.models import GptShape
from benchmarks.harness.ranks import Row
from benchmarks.harness.report import MS, Column, Rows, Section, bars, green
from benchmarks.harness.rounds import quotient, race_on_device
from zero_core.errors import ZeroError

RATIOS: tuple[float | str, ...] = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0, "auto")
DEEPSPEED_RATIOS = (0.8, 0.6, 0.4, 0.2)
"""DeepSpeed has them at stage 3 alone. It counts sub-groups, not elements."""
SETTLING = 80
"""Most steps for ``"ratio": "auto"`` to measure and settle, after the warm-up."""
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
# At ratio 0 all states must fit on the device.
GPT_1_3B = GptShape(layers=24, width=2048, heads=16, vocab=50257, context=1024)
SPEED = Job("", "", GPT_1_3B, micro_batch=4, steps=10, warmup=3, dtype="bf16", stage=2)


def speed_jobs(first: Job) -> list[Job]:
    """Return every contender, this engine at the stage of ``first``."""

    def job(name: str, side: str, stage: int, **offload: Any) -> Job:
        return replace(
            first.unchecked(),
            name=name,
            side=side,
            settling=SETTLING if offload.get("ratio") == "auto" else 0,
            stage=stage,
            zero={"offload_optimizer": {**PINNED, **offload}},
        )

    peers = [(f"deepspeed-3 ratio {ratio}", ratio) for ratio in DEEPSPEED_RATIOS]
    return [
        *(job(f"ratio {ratio}", "zero", first.stage, ratio=ratio) for ratio in RATIOS),
        job("fsdp2", "fsdp2", 3),
        job("fsdp2, units kept", "fsdp2", 2),
        job("deepspeed-2", "deepspeed", 2),
        job("deepspeed-3", "deepspeed", 3),
        *(job(name, "deepspeed", 3, ratio=ratio) for name, ratio in peers),
    ]


def _part(name: str, about: str, first: Job, rounds: Mapping[int, int]) -> Part:
    """Return a part with rounds by micro-batch, in order: the time may end before the last."""

    def run(context: Context) -> Row:
        """Return a row per contender and micro-batch, and the verdicts by micro-batch."""
        rows: dict[str, Row] = {}
        judged: dict[str, Row] = {}
        is_dry = context.is_dry_run
        for micro_batch, num_rounds in ({2: 1} if is_dry else rounds).items():
            jobs = speed_jobs(replace(context.sized(first), micro_batch=micro_batch))
            # The two ends of the comparison first.
            order = ("ratio 0.4", "fsdp2") if is_dry else ("ratio 1.0", *PEERS, "ratio auto")
            known = {job.name: job for job in jobs}
            names = order if is_dry else dict.fromkeys((*order, *known))
            able, found = [], {}
            for job in (known[name] for name in names):
                if why := _why_too_large(job):
                    found[job.name] = {"skipped": why}
                else:
                    able.append(job)
            print(f"micro-batch {micro_batch}", flush=True)
            found = race_on_device(able, num_rounds, context.runner) | found
            rows |= {f"batch {micro_batch}, {name}": row for name, row in found.items()}
            judged[f"batch {micro_batch}"] = verdicts(found, is_judged=not is_dry)
        return {"device_limit_bytes": first.device_limit_bytes, "rows": rows, "verdicts": judged}

    return Part(name, about, 12.0, run, _section)


def _why_too_large(job: Job) -> str:
    """Return why the host cannot hold this engine's job. Peers have no plan."""
    if job.side != "zero":
        return ""
    try:
        # The model itself lies on the host while it is built.
        return why_too_large(job.plan().memory.host_bytes + 4 * job.shape.numel)
    except ZeroError as error:
        return str(error)


def verdicts(rows: Rows, *, is_judged: bool = True) -> Row:
    """Return ratios of tokens per second, each with its bar and the missing contenders.

    Null where a side has no figure, and not judged unless every peer and every fixed ratio has been
    tried: a ratio that did not fit was, one after the end of the time was not.

    Args:
        rows: of one micro-batch, by contender.
        is_judged: whether bars apply: not on the CPU.
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


def _section(found: Row) -> Section:
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
    color = green(lambda name: name.rpartition(", ")[2].startswith("ratio"))
    values = {"": "tokens_per_s"}
    panels = bars(title, found["rows"], values, "tokens per second", color=color)
    return Section(title, found["rows"], COLUMNS, "\n".join(lines), panels=panels)


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
        device_limit_bytes=76 * 10**9,  # of a device of 80 GB, beside what its driver keeps
    ),
    rounds={4: 1, 1: 1, 8: 1, 2: 1},
)
