"""Two runs beside each other, axis by axis. A is the first, B the second."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from zero_core.plan.result import format_bytes
from zero_engine.report import charts
from zero_engine.report.configuration import differences
from zero_engine.report.diagnosis import show_s, transient_bytes
from zero_engine.report.measured import WAITS, Measured, RankStep, kept_bytes, sent_bytes
from zero_engine.report.page import Block, Chart, Move, Table, Text
from zero_engine.report.run import Rank

NAMES = ("A", "B")
_SAME = 0.01
"""Relative difference below which two figures are called the same."""
_MAX_RANKS = 16
_Figure = float | None


def compare(first: Measured, second: Measured, moves: Sequence[Sequence[Move]]) -> Iterator[Block]:
    """Yield the blocks that compare two runs. ``moves`` are the next ones of each."""
    both = (first, second)
    yield Text(_summary(first, second))
    yield _table("time of a usual step", _times(both), show_s)
    parts = {f"{name}, rank 0": each.first for name, each in zip(NAMES, both, strict=True)}
    spec = charts.step_parts(parts)
    if spec is not None:
        yield Chart(spec)
    yield _table("memory of a rank", _memory(both), lambda value: format_bytes(round(value)))
    yield _table(
        "bytes that rank 0 sends in a step",
        _by_key(
            [{f"{what}, {link}": n for what, link, n in sent_bytes(m.run.ranks[0])} for m in both]
        ),
        lambda value: format_bytes(round(value)),
    )
    yield _table("training", _training(both), _number)
    for title, lines in (
        ("loss", [charts.loss_series(m.run.ranks) for m in both]),
        ("loss on held-out text", [m.run.held_out for m in both]),
        ("gradient norm", [charts.series_of(m.run.ranks[0], "grad_norm") for m in both]),
        ("loss scale", [_loss_scales(m) for m in both]),
        ("seconds of a step", [charts.series_of(m.run.ranks[0], "seconds") for m in both]),
    ):
        spec = charts.over_steps(dict(zip(NAMES, lines, strict=True)), title)
        if spec is not None:
            yield Chart(spec)
    yield _table("own work of a rank, without waits", _ranks(both), show_s)
    yield _table("checkpoints, failures and resumes", _events(both), _number)
    for name, each in zip(NAMES, both, strict=True):
        for failure in each.run.failures:
            yield Text(f"{name}: {failure}.")
    yield _next_moves(moves)
    yield from _differing("configuration", [dict(differences(m.run.run)) for m in both], "default")
    yield from _differing("model", [_texts(m.run.run.model) for m in both], "")
    yield from _differing("environment", [_texts(m.run.run.environment) for m in both], "")


def _summary(first: Measured, second: Measured) -> str:
    said = [
        _more(second.samples_per_s, first.samples_per_s, "samples a second", "more", "fewer"),
        _more(_peak(second), _peak(first), "memory of a rank", "more", "less"),
        _more(_sent(second), _sent(first), "bytes sent in a step", "more", "fewer"),
    ]
    step, losses = _last_common_loss(first, second)
    if step is not None:
        said.append(f"a loss of {losses[1]:.4g} against {losses[0]:.4g} at step {step}")
    return f"Beside A, B has {', '.join(said)}."


def _more(after: float, before: float, what: str, more: str, less: str) -> str:
    change = after / before - 1.0 if before else math.inf if after else 0.0
    if before and not after:
        return f"no {what}"
    if abs(change) < _SAME:
        return f"as much {what}" if less == "less" else f"as many {what}"
    if math.isinf(change):
        return f"{what}, which A has none of"
    return f"{abs(change):.0%} {more if change > 0 else less} {what}"


_Row = tuple[str, Sequence[_Figure]]


def _table(caption: str, rows: Iterable[_Row], show: Callable[[float], str]) -> Table:
    return Table(
        [caption, *NAMES, "B to A"],
        [
            [title, *("" if v is None else show(v) for v in values), _change(*values)]
            for title, values in rows
            if any(value is not None for value in values)
        ],
    )


def _times(both: Sequence[Measured]) -> Iterator[_Row]:
    yield "a step", [m.seconds for m in both]
    yield "a sample", [1.0 / m.samples_per_s if m.samples_per_s else None for m in both]
    for name, of_rank in (
        ("own work: ", [m.first.places for m in both]),
        ("wait for ", [m.first.waits for m in both]),
        ("lane: ", [m.first.lanes for m in both]),
    ):
        for key, values in _by_key(of_rank):
            yield f"{name}{WAITS.get(key, key)}", values


def _memory(both: Sequence[Measured]) -> Iterator[_Row]:
    yield "at most", [_peak(m) for m in both]
    yield "after a step", [max(r.held_bytes for r in m.ranks) for m in both]
    yield "tallest moment, above a step's begin", [transient_bytes(m)[0] for m in both]
    yield from _by_key([kept_bytes(m.run.ranks[0]) for m in both])


def _training(both: Sequence[Measured]) -> Iterator[_Row]:
    yield "steps", [m.num_all for m in both]
    yield "skipped steps", [m.num_skipped for m in both]
    yield "samples a step", [sum(rank.samples for rank in m.ranks) for m in both]
    yield "ranks", [m.run.run.world_size for m in both]
    yield "parameters of the model", [m.run.run.num_parameters for m in both]
    step, losses = _last_common_loss(*both)
    if step is not None:
        yield f"loss at step {step}", losses
    yield "last loss", [_last(charts.loss_series(m.run.ranks)) for m in both]
    yield "last loss on held-out text", [_last(m.run.held_out) for m in both]
    yield "last loss scale", [_last(_loss_scales(m)) for m in both]


def _loss_scales(found: Measured) -> Sequence[tuple[int, float]]:
    rank = found.run.ranks[0]
    return charts.series_of(rank, "loss_scale") if rank.run.config["fp16"]["enabled"] else []


def _ranks(both: Sequence[Measured]) -> Iterator[_Row]:
    own = [{f"rank {r.run.rank}": u.own_s for r, u in _pairs(m)} for m in both]
    yield "the slowest", [max(o.values()) for o in own]
    yield "the median", [median(o.values()) for o in own]
    yield from list(_by_key(own))[:_MAX_RANKS]


def _pairs(found: Measured) -> Iterator[tuple[Rank, RankStep]]:
    return zip(found.run.ranks, found.ranks, strict=True)


def _events(both: Sequence[Measured]) -> Iterator[_Row]:
    firsts = [m.run.ranks[0] for m in both]
    for what in dict.fromkeys(event.what for rank in firsts for event in rank.events):
        yield what, [sum(event.what == what for event in rank.events) for rank in firsts]
    yield "resumed", [sum(start.first_step > 0 for start in rank.starts) for rank in firsts]
    yield "failures", [len(m.run.failures) for m in both]
    yield "ranks without records", [len(m.run.absent) for m in both]


def _next_moves(moves: Sequence[Sequence[Move]]) -> Table:
    changes = list(dict.fromkeys(move.change for of_run in moves for move in of_run))
    gains = [{move.change: move.gain for move in of_run} for of_run in moves]
    rows = [[change, *(of_run.get(change, "") for of_run in gains)] for change in changes]
    return Table(["next move, and what is predicted", *NAMES], rows or [["none", "", ""]])


def _by_key(tables: Sequence[Mapping[str, float]]) -> Iterator[_Row]:
    for key in dict.fromkeys(key for table in tables for key in table):
        values = [table.get(key) for table in tables]
        if any(values):
            yield key, values


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value, 0) else f"{value:.5g}"


def _last(series: Sequence[tuple[int, float]]) -> _Figure:
    return series[-1][1] if series else None


def _last_common_loss(first: Measured, second: Measured) -> tuple[int | None, list[float]]:
    """Return the last step of which both have a loss, and the losses."""
    series = [
        {step: loss for step, loss in charts.loss_series(m.run.ranks) if math.isfinite(loss)}
        for m in (first, second)
    ]
    step = max(series[0].keys() & series[1].keys(), default=None)
    return step, [] if step is None else [losses[step] for losses in series]


def _peak(found: Measured) -> float:
    return float(max(rank.peak_bytes for rank in found.ranks))


def _sent(found: Measured) -> float:
    return float(sum(nbytes for *_, nbytes in sent_bytes(found.run.ranks[0])))


def _change(before: _Figure, after: _Figure) -> str:
    if before is None or after is None:
        return ""
    if before == after:
        return "="
    return f"{after / before - 1.0:+.0%}" if before else ""


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()
    }


def _differing(what: str, tables: Sequence[Mapping[str, str]], absent: str) -> Iterator[Block]:
    one, two = tables
    keys = [key for key in {**one, **two} if one.get(key) != two.get(key)]
    if keys:
        rows = [[key, one.get(key, absent), two.get(key, absent)] for key in keys]
        yield Table([f"{what} that differs", *NAMES], rows)
    else:
        yield Text(f"Both have the same {what}.")
