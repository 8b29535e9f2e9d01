"""Length of a step with offload in virtual time. Nothing is measured on a device.

Steps are compared with the bounds of [Note: bounds] in `lab.experiments.schedule.job`, for fixed
times of 10.3 B parameters, for the ratio that ``"auto"`` finds, and for random times.

The tail is the time per step in which the limiting resource is idle, minus the part that no order
of updates can avoid. Where the host limits, that part is the last unit's forward, and its backward
too if updates run during backward. Both are between the last update and the first gradient.

With random times a block has eight chunks, in comparisons with "auto" four.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from benchmarks.harness.options import RESULTS, Output, of
from benchmarks.harness.ranks import Row
from benchmarks.harness.report import MS, Column, Panel, Section, judged, publish
from lab.experiments.schedule.job import LAUNCH_S, MODES, Job, Mode, Times, Variant
from lab.experiments.schedule.machines import FP32
from lab.experiments.schedule.picture import lane_panel
from zero_offload.testing.virtual_time import Span

PLAIN: tuple[Mode, ...] = MODES[:2]
LOGGED: tuple[tuple[Mode, int], ...] = (
    ("with an undo log", 0),
    ("with an undo log", 10),
    ("every step clipped", 1),
)
"""Modes with an undo log, and the number of steps of which one is clipped."""
RATIOS = (1.0, 0.75, 0.5, 0.4, 0.25, 0.0)
BAR, TAIL_BAR_S = 1.05, 0.020
BEFORE = {
    "as before": Variant("first", is_fifo=True, is_hasty=True),
    "host has the first blocks": Variant("first"),
    "updates in order of arrival": Variant(is_fifo=True),
    "caller makes up wait": Variant(is_hasty=True),
}


def _row(times: Times, mode: Mode, ratio: float, step_s: float, **more: Any) -> Row:
    bound_s = times.bound_s(mode, ratio)
    return {
        "mode": mode,
        "ratio": ratio,
        "step_s": step_s,
        "bound_s": bound_s,
        "over_bound": step_s / bound_s,
        "tail_s": step_s - bound_s - times.last_unit_s(mode, ratio),
        **more,
    }


def fixed_rows(lanes: dict[str, list[Span]]) -> Iterator[Row]:
    """Yield steps at `RATIOS`, and at 1 and 0.4 with earlier schedules and timed undo logs."""
    times = Times()
    for mode in MODES:
        for ratio in RATIOS:
            job = Job(times, mode, ratio)
            row = _row(times, mode, ratio, job.run(), case=f"{mode}, ratio {ratio}")
            is_met = row["over_bound"] <= BAR and row["tail_s"] <= TAIL_BAR_S
            if ratio in (1.0, 0.4):
                lanes[row["case"]] = job.lanes()
            yield {**row, "is_met": is_met}
    yield from logged_rows(times)
    for name, variant in BEFORE.items():
        for ratio in (1.0, 0.4):
            job = Job(times, "in backward", ratio, variant)
            case = f"{name}, ratio {ratio}"
            yield _row(times, "in backward", ratio, job.run(), case=case, is_met=None)
            if ratio == 1.0 and name == next(iter(BEFORE)):
                lanes[case] = job.lanes()


def logged_rows(times: Times) -> Iterator[Row]:
    """Yield steps with an undo log whose copies take time."""
    byte_s = times.host_s / FP32.update
    logged = replace(
        times, log_s=FP32.log * byte_s, keep_s=FP32.keep * byte_s, undo_s=FP32.undo * byte_s
    )
    for mode, clipped_every in LOGGED:
        for ratio in (1.0, 0.4):
            job = Job(logged, mode, ratio, clipped_every=clipped_every)
            name = mode if clipped_every in (0, 1) else f"one step in {clipped_every} clipped"
            case = f"{name}, copies timed, ratio {ratio}"
            yield _row(times, mode, ratio, job.mean_run(), case=case, is_met=None)


def auto_rows() -> Iterator[Row]:
    """Yield steps at the ratio that ``"auto"`` finds, with the best fixed ratio."""
    for mode in PLAIN:
        yield _auto_row(Times(), mode, f"auto, {mode}")


def _auto_row(times: Times, mode: Mode, case: str) -> Row:
    def step_s(ratio: float) -> float:
        return Job(times, mode, ratio, chunks_per_block=4).run()

    ratio = Job(times, mode, "auto", chunks_per_block=4).settle()
    best_s, best = min((step_s(eighth / 8), eighth / 8) for eighth in range(9))
    found_s = step_s(ratio)
    row = _row(times, mode, ratio, found_s, case=case, best_ratio=best, best_s=best_s)
    return {**row, "over_best": found_s / best_s, "is_met": found_s <= BAR * best_s}


def random_times(count: int) -> list[Times]:
    """Return random times with links no slower than backward, and fast and slow hosts."""
    draw = random.Random(18)
    found = []
    for _ in range(count):
        forward_s = 10 ** draw.uniform(-1, 0)
        backward_s = forward_s * draw.uniform(2, 3.3)
        both = forward_s + backward_s
        found.append(
            Times(
                forward_s=forward_s,
                backward_s=backward_s,
                link_s=backward_s * draw.uniform(0.05, 0.9),
                host_s=both * 10 ** draw.uniform(-0.5, 0.6),
                device_s=both * draw.uniform(0.01, 0.15),
                blocks=draw.choice((24, 32, 48, 64)),
            )
        )
    return found


def random_rows(count: int, *, has_auto: bool) -> Iterator[Row]:
    """Yield steps with random times, at ratios 1 and 0.4 or at that of ``"auto"``."""
    for number, times in enumerate(random_times(count)):
        for mode in PLAIN:
            more: Row = {"case": f"{number}, {mode}", **asdict(times)}
            if has_auto:
                yield {**more, **_auto_row(times, mode, more["case"])}
                continue
            for ratio in (1.0, 0.4):
                step_s = Job(times, mode, ratio, chunks_per_block=8).run()
                row = _row(times, mode, ratio, step_s)
                yield {**more, **row, "is_met": row["over_bound"] <= BAR}


PARTS = ("fixed", "auto", "random", "random_auto")


def main(
    only: Annotated[list[str] | None, of(PARTS)] = None,
    draws: Annotated[int, typer.Option(min=1, help="Random times.")] = 100,
    auto_draws: Annotated[int, typer.Option(min=1, help="Of these with auto.")] = 25,
    output: Output = RESULTS,
) -> None:
    """Simulate, write ``schedule.json`` and ``schedule.png``, print a table per part."""
    lanes: dict[str, list[Span]] = {}
    made: dict[str, Iterator[Row]] = {
        "fixed": fixed_rows(lanes),
        "auto": auto_rows(),
        "random": random_rows(draws, has_auto=False),
        "random_auto": random_rows(auto_draws, has_auto=True),
    }
    parts = {part: list(made[part]) for part in only or PARTS}
    report = {"times": asdict(Times()), "launch_s": LAUNCH_S, "parts": parts}
    publish(output, "schedule", report, list(sections(parts, lanes)))


def sections(
    parts: Mapping[str, Sequence[Row]], lanes: Mapping[str, Sequence[Span]]
) -> Iterator[Section]:
    """Yield a table per part: all fixed rows, and the worst of the random rows."""
    columns = [
        Column("step s", "step_s", ".3f"),
        Column("bound s", "bound_s", ".3f"),
        Column("of bound", lambda row: judged(row["over_bound"], ".3f", row["is_met"])),
        Column("tail ms", "tail_s", ".1f", MS),
    ]
    if "fixed" in parts:
        panels: list[Panel] = [lane_panel(case, spans) for case, spans in lanes.items()]
        rows = {row["case"]: row for row in parts["fixed"]}
        yield Section("steps in virtual time", rows, columns, heading="case", panels=panels)
    best = Column("of best", lambda row: judged(row["over_best"], ".3f", row["is_met"]))
    found = [Column("ratio", "ratio", ".3f"), Column("best ratio", "best_ratio", ".3f"), best]
    if "auto" in parts:
        rows = {row["case"]: row for row in parts["auto"]}
        yield Section("the ratio that auto finds", rows, [*found, *columns[:2]], heading="case")
    given = [
        Column(name.removesuffix("_s"), name, ".3f")
        for name in ("forward_s", "backward_s", "link_s", "host_s", "device_s")
    ]
    if "random" in parts:
        listed = sorted(parts["random"], key=lambda row: -float(row["over_bound"]))
        rows = {f"{row['case']}, ratio {row['ratio']}": row for row in listed[:5]}
        caption = _share_met(listed)
        yield Section(
            "random times, the worst", rows, [columns[2], *given], caption=caption, heading="draw"
        )
    if "random_auto" in parts:
        listed = sorted(parts["random_auto"], key=lambda row: -float(row["over_best"]))
        rows = {row["case"]: row for row in listed[:5]}
        caption = _share_met(listed)
        yield Section(
            "random times with auto, the worst",
            rows,
            [*found, *given],
            caption=caption,
            heading="draw",
        )


def _share_met(rows: Sequence[Row]) -> str:
    return f"{sum(bool(row['is_met']) for row in rows)} of {len(rows)} within {BAR}"
