"""Step time without offload over step time with offload, in virtual time.

This ratio is called practicality and is 1 where offload costs no time. A GPT of 6.6 B parameters is
trained at ratio 1 with clipping, on machines described by published figures
(`lab.experiments.schedule.machines`). The engine and zero-offload's tiers really run
(`lab.experiments.schedule.job`). Published schedules of other libraries are simulated with the same
times (`lab.experiments.schedule.peers`).

[Note: steps]
no offload          the device updates everything after backward
after the decision  the host updates when the norm is known
undo log            the host also updates during backward, and a log keeps the old states
one in ten clipped  the same, and every tenth step undoes its updates
every step clipped  the same, and every step undoes its updates. Without ``update_in_backward:
                    true`` the engine would then return to updates after the decision
bound               max(forward + backward, host update, link), the least time of any schedule in
                    which the host makes every update
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

import typer

from benchmarks.harness.models import GptShape
from benchmarks.harness.options import RESULTS, Output, of, parse_size
from benchmarks.harness.ranks import Row
from benchmarks.harness.report import Axes, Column, Panel, Section, bars, judged, publish
from lab.experiments.schedule import peers
from lab.experiments.schedule.job import Job, Mode, Times
from lab.experiments.schedule.machines import (
    BESIDE,
    EPYC,
    FP32,
    FUSED,
    INT8,
    MACHINES,
    Machine,
    States,
    chunks_per_block,
    rates_of,
    times_of,
)
from lab.experiments.schedule.picture import lane_panel
from zero_offload.testing.virtual_time import Span

VOCAB, CONTEXT = 32_000, 4096
TOKENS = (16_384, 4096)
BARS: Mapping[int, float] = {16_384: 0.9, 4096: 0.6}
"""Minimum practicality, by tokens per step and device."""
CLIPPED_EVERY = 10
HOST_GB = (200, 300, 400, 500, 600, 800, 1000, 1200)
"""Peak bandwidths of a node's host memory, in GB/s."""


@dataclass(frozen=True)
class Case:
    """A training with offload.

    Attributes:
        is_modelled: whether the code of this case does not exist.
    """

    name: str
    mode: Mode
    states: States = FP32
    clipped_every: int = 0
    micro_batches: int = 1
    is_vertical: bool = False
    chunk_share: float = 1.0
    is_modelled: bool = False


LATE = Case("after the decision", "after the decision")
LOGGED = Case("undo log", "with an undo log")
LATE_8, LOGGED_8 = (
    replace(case, name=f"{case.name}, 8-bit states", states=INT8) for case in (LATE, LOGGED)
)
CASES = (
    LATE,
    LOGGED,
    Case("undo log, one in ten clipped", "with an undo log", clipped_every=CLIPPED_EVERY),
    Case("undo log, every step clipped", "every step clipped"),
    LATE_8,
    LOGGED_8,
    Case("undo log, 8-bit states, one in ten clipped", "with an undo log", INT8, CLIPPED_EVERY),
    Case("undo log, 8-bit states, every step clipped", "every step clipped", INT8),
    Case("undo log in the kernel's pass", "with an undo log", FUSED, is_modelled=True),
    Case("new states beside the old", "with an undo log", BESIDE, is_modelled=True),
)
MICRO_BATCHES = 4
WAYS = (
    LOGGED,
    replace(LOGGED, name="chunks of 2^22 elements", chunk_share=0.25),
    replace(LOGGED, name="chunks of 2^26 elements", chunk_share=4.0),
    *(
        replace(
            case,
            name=f"{case.name}, 4 micro-batches{', vertical' if is_vertical else ''}",
            micro_batches=MICRO_BATCHES,
            is_vertical=is_vertical,
        )
        for case in (LATE, LOGGED)
        for is_vertical in (False, True)
    ),
)
"""Other settings, with fp32 states."""


def job_of(case: Case, times: Times, chunks: float) -> Job:
    """Return the training of a case. ``chunks`` is the number of update chunks per block."""
    return Job(
        times,
        case.mode,
        1.0,
        chunks_per_block=chunks / case.chunk_share,
        clipped_every=case.clipped_every,
        is_eight_bit=case.states.is_eight_bit,
        micro_batches=case.micro_batches,
        is_vertical=case.is_vertical,
    )


def device_s(times: Times, chunks: float) -> float:
    return Job(times, "after the decision", 0.0, chunks_per_block=chunks).run()


def _row(machine: Machine, tokens: int, name: str, off_s: float, step_s: float, **more: Any) -> Row:
    return {
        "machine": machine.name,
        "tokens": tokens,
        "schedule": name,
        "device_s": off_s,
        "step_s": step_s,
        "practicality": off_s / step_s,
        **more,
    }


def rows_of(cases: Sequence[Case], machine: Machine, shape: GptShape, tokens: int) -> Iterator[Row]:
    chunks, bar = chunks_per_block(machine, shape), BARS.get(tokens)
    off_s = device_s(times_of(machine, shape, tokens, FP32), chunks)
    for case in cases:
        times = times_of(machine, shape, tokens, case.states)
        step_s = job_of(case, times, chunks).mean_run()
        is_judged = bar is not None and not case.is_modelled
        is_met = off_s / step_s >= bar if is_judged and bar is not None else None
        more = {"states": case.states.name, "is_modelled": case.is_modelled, "is_met": is_met}
        yield _row(machine, tokens, case.name, off_s, step_s, **more)


def bound_rows(machine: Machine, shape: GptShape, tokens: int) -> Iterator[Row]:
    """Yield the least step times of all schedules in which the host updates everything."""
    off_s = device_s(times_of(machine, shape, tokens, FP32), chunks_per_block(machine, shape))
    for states in (FP32, INT8):
        times = times_of(machine, shape, tokens, states)
        least_s = times.bound_s("in backward", 1.0)
        yield _row(machine, tokens, f"bound, {states.name} states", off_s, least_s)


def peer_rows(machine: Machine, shape: GptShape, tokens: int) -> Iterator[Row]:
    """Yield the steps of published schedules on a machine, with fp32 states."""
    times = times_of(machine, shape, tokens, FP32)
    off_s = device_s(times, chunks_per_block(machine, shape))
    for peer in peers.PEERS:
        step_s, _ = peers.run(peer, times)
        clipped_s, _ = peers.run(peer, times, CLIPPED_EVERY)
        all_s, _ = peers.run(peer, times, 1)
        more = {
            "paper": peer.paper,
            "numerics": peer.numerics,
            "one_in_ten_clipped": off_s / clipped_s,
            "every_step_clipped": off_s / all_s,
        }
        yield _row(machine, tokens, peer.name, off_s, step_s, **more)


def bandwidth_rows(shape: GptShape, tokens: int) -> Iterator[Row]:
    """Yield steps of eight H100 for each of several peaks of host memory."""
    for gigabytes in HOST_GB:
        machine = replace(EPYC, name=f"{gigabytes} GB/s", host_bytes_per_s=gigabytes * 1e9)
        for row in rows_of((LATE, LOGGED, LOGGED_8), machine, shape, tokens):
            yield {**row, "host_gb_per_s": gigabytes}
        for row in peer_rows(machine, shape, tokens):
            yield {**row, "host_gb_per_s": gigabytes}


def main(
    machine: Annotated[list[str] | None, of([m.name for m in MACHINES], "--machine")] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(min=CONTEXT, help="Per step and device, of 4096 a sample.")
    ] = None,
    size: Annotated[str, typer.Option(help="LAYERSxWIDTH of the GPT.")] = "32x4096",
    output: Output = RESULTS,
) -> None:
    """Simulate, write ``practicality.json`` and ``practicality.png``, print tables."""
    shape = parse_size(size, vocab=VOCAB, context=CONTEXT)
    machines = [m for m in MACHINES if m.name in (machine or [m.name])]
    counts = sorted(set(tokens or TOKENS), reverse=True)
    if any(count % CONTEXT for count in counts):
        raise typer.BadParameter(f"a multiple of {CONTEXT}", param_hint="--tokens")
    report: dict[str, Any] = {
        "model": {**asdict(shape), "parameters": shape.numel},
        "machines": [
            {
                **asdict(m),
                "rates": rates_of(m)[1],
                "times": {
                    str(count): {
                        states.name: asdict(times_of(m, shape, count, states))
                        for states in (FP32, INT8)
                    }
                    for count in counts
                },
            }
            for m in machines
        ],
        "rows": [r for m in machines for n in counts for r in rows_of(CASES, m, shape, n)],
        "bounds": [r for m in machines for n in counts for r in bound_rows(m, shape, n)],
        "peers": [r for m in machines for n in counts for r in peer_rows(m, shape, n)],
        "ways": [r for m in machines for n in counts for r in rows_of(WAYS, m, shape, n)],
        "bandwidth": [r for n in counts for r in bandwidth_rows(shape, n)],
    }
    lanes = dict(_lanes(machines[0], shape, counts[-1]))
    publish(output, "practicality", report, list(sections(report, lanes)))


def _lanes(machine: Machine, shape: GptShape, tokens: int) -> Iterator[tuple[str, Sequence[Span]]]:
    """Yield the spans of this engine's step with an undo log and of the published schedules."""
    times = times_of(machine, shape, tokens, FP32)
    job = job_of(LOGGED, times, chunks_per_block(machine, shape))
    step_s = job.run()
    about = f"{machine.name}, {tokens} tokens"
    yield f"{about}: this engine, undo log, {step_s:.3f} s", job.lanes()
    for peer in peers.PEERS:
        step_s, spans = peers.run(peer, times)
        yield f"{peer.name} ({peer.paper}), {step_s:.3f} s", spans


def sections(report: Mapping[str, Any], lanes: Mapping[str, Sequence[Span]]) -> Iterator[Section]:
    """Yield tables of practicality and of other settings for each number of tokens."""
    machines = [machine["name"] for machine in report["machines"]]
    columns = [_column(name) for name in machines]
    counts = list(dict.fromkeys(row["tokens"] for row in report["rows"]))
    for count in counts:
        bar = BARS.get(count)
        rows = _by_schedule([*report["rows"], *report["bounds"], *report["peers"]], count)
        title = f"step without offload over step with it, {count} tokens"
        values = {name: lambda row, name=name: row[name]["practicality"] for name in machines}
        panels = bars(title, rows, values, "practicality", bar=bar)
        panels.append(_bandwidth_panel(report["bandwidth"], count))
        caption = None if bar is None else f"bar {bar}"
        yield Section(title, rows, columns, caption, "schedule", panels)
    for count in counts:
        rows = _by_schedule(report["ways"], count)
        yield Section(f"other settings, {count} tokens", rows, columns, None, "setting")
    rows = {row["schedule"]: row for row in report["peers"]}
    told = [Column("numerics", "numerics"), Column("paper", "paper")]
    panels = [lane_panel(case, spans) for case, spans in lanes.items()]
    yield Section("published schedules", rows, told, None, "schedule", panels)


def _column(machine: str) -> Column:
    def cell(row: Row) -> str | None:
        found = row[machine]
        shown = judged(found["practicality"], ".2f", found.get("is_met"))
        return f"{shown} ({found['step_s']:.3f} s)"

    return Column(machine, cell)


def _by_schedule(rows: Sequence[Row], tokens: int) -> dict[str, Row]:
    found: dict[str, Row] = {}
    for row in rows:
        if row["tokens"] == tokens:
            found.setdefault(row["schedule"], {})[row["machine"]] = row
    return found


def _bandwidth_panel(rows: Sequence[Row], tokens: int) -> Panel:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["tokens"] == tokens:
            point = row["host_gb_per_s"], row["practicality"]
            lines.setdefault(row["schedule"], []).append(point)

    def draw(axes: Axes) -> None:
        for name, points in lines.items():
            is_peer = any(name == peer.name for peer in peers.PEERS)
            axes.plot(*zip(*points, strict=True), "--" if is_peer else "-", label=name, marker=".")
        if tokens in BARS:
            axes.axhline(BARS[tokens], color="black", linewidth=0.8)
        axes.set_xlabel("GB/s of a node's host memory, of which 0.6 is assumed to be reached")
        axes.set_ylabel("practicality")
        axes.legend(fontsize="small")

    return (f"practicality of 8 H100 by host memory, {tokens} tokens", 12, draw)
