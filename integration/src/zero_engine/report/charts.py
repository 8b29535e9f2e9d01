"""Charts of a report, as Vega-Lite specifications: plain data, which the page draws.

Texts of a run (names, errors) occur only as data values, never in an expression.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from zero_core.records import DetailRecord, StepRecord
from zero_engine.report.run import WAITS, Measured, Rank

Spec = dict[str, Any]
MAX_RANKS = 8
_MAX_POINTS = 600
_MAX_SPANS = 400
_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
_COLORS = {
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "step": "#009e73",
    "outside": "#999999",
    "wait": "#d62728",
    "gather": "#cc79a7",
    "reduce": "#e69f00",
    "copies": "#8a63d2",
    "host": "#009e73",
}
LANES = ("compute", "gather", "reduce", "copies", "ranks", "host", "file")


def _chart(height: int, values: Sequence[Mapping[str, Any]], **parts: Any) -> Spec:
    return {
        "$schema": _SCHEMA,
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"values": [dict(value) for value in values]},
        **parts,
    }


def _x(field: str, title: str, **more: Any) -> Spec:
    axis = {"tickCount": 10}  # upper bound: Vega drops labels without room
    return _field(field, title, "quantitative", axis=axis, **more)


def _field(field: str, title: str | None = None, kind: str = "nominal", **more: Any) -> Spec:
    return {"field": field, "type": kind, "title": title, **more}


def _legend() -> Spec:
    columns = {"expr": "width < 400 ? 1 : 2"}
    return {"orient": "bottom", "columns": columns, "labelLimit": 260}


def memory_over_step(ranks: Sequence[Rank]) -> list[Spec]:
    rows: list[dict[str, Any]] = []
    for rank in ranks[:MAX_RANKS]:
        recorded = [detail for detail in rank.details if detail.memory]
        if not recorded:
            continue
        detail = recorded[-1]
        base = min(held for _, held, _ in detail.memory)
        is_host = rank.run.environment.get("device") == "cpu"
        layers = Counter(detail.kinds) + Counter(detail.host_kinds if is_host else {})
        known = layers.total()
        if not is_host:  # on a CPU the other memory is mostly the interpreter's
            layers["other states"] = max(base - known, 0)
        for at, held, place in detail.memory[:_MAX_SPANS]:
            moment = {"ms": at * 1e3, "place": place, "rank": f"rank {rank.run.rank}"}
            rows += [{**moment, "kind": k, "mib": size / 2**20} for k, size in layers.items()]
            transient = max(held - max(base, known), 0)
            rows.append({**moment, "kind": "activations, temporaries", "mib": transient / 2**20})
    spec = _chart(
        150,
        [],
        mark={"type": "area", "interpolate": "step-after", "tooltip": True},
        encoding={
            "x": _x("ms", "milliseconds of a step", scale={"zero": True}),
            "y": _field("mib", "MiB", "quantitative", stack="zero"),
            "color": _field("kind", legend=_legend()),
            "tooltip": [
                {"field": "place", "title": "place"},
                {"field": "kind", "title": "kind"},
                {"field": "mib", "title": "MiB", "format": ".1f"},
            ],
        },
    )
    return _per_rank(spec, rows)


def _per_rank(spec: Spec, rows: Sequence[Mapping[str, Any]]) -> list[Spec]:
    """Return one chart per rank. Vega-Lite fits only single charts to the page's width."""
    names = list(dict.fromkeys(str(row["rank"]) for row in rows))
    return [
        {
            **spec,
            "title": name,
            "data": {"values": [dict(row) for row in rows if row["rank"] == name]},
        }
        for name in names
    ]


def bars(rows: Sequence[Mapping[str, Any]], x: str, y: str, color: str, title: str) -> Spec | None:
    if not rows:
        return None
    num = len({row[y] for row in rows})
    return _chart(
        26 * num + 20,
        rows,
        mark={"type": "bar", "tooltip": True},
        encoding={
            "x": _x(x, title, stack="zero"),
            "y": _field(y, sort=None, axis={"labelLimit": 150}),
            "color": _field(color, legend=_legend()),
        },
    )


def lanes(ranks: Sequence[Rank]) -> list[Spec]:
    rows: list[dict[str, Any]] = []
    for rank in ranks[:MAX_RANKS]:
        if not rank.details:
            continue
        detail = rank.details[-1]
        longest = sorted(_joined(detail), key=lambda span: span[2] - span[3])[:_MAX_SPANS]
        for lane, name, start, stop, is_wait in longest:
            kind = "wait" if is_wait else _kind(lane, name)
            times = {"start": start * 1e3, "stop": stop * 1e3, "ms": (stop - start) * 1e3}
            title = f"rank {rank.run.rank}, step {detail.step}"
            rows.append({"rank": title, "lane": lane, "name": name, **times, "kind": kind})
    kinds = [kind for kind in _COLORS if any(row["kind"] == kind for row in rows)]
    present = [lane for lane in LANES if any(row["lane"] == lane for row in rows)]
    spec = _chart(
        24 * len(present) + 10,
        [],
        mark={"type": "bar", "tooltip": True, "height": {"band": 0.8}},
        encoding={
            "x": _x("start", "milliseconds of a step"),
            "x2": {"field": "stop"},
            "y": _field("lane", sort=present),
            "color": _field(
                "kind",
                legend={"orient": "bottom", "columns": 4},
                scale={"domain": kinds, "range": [_COLORS[kind] for kind in kinds]},
            ),
            "tooltip": [
                {"field": "name", "title": "what"},
                {"field": "ms", "title": "ms", "format": ".3f"},
                {"field": "start", "title": "from", "format": ".3f"},
            ],
        },
    )
    return _per_rank(spec, rows)


def _joined(detail: DetailRecord) -> list[tuple[str, str, float, float, bool]]:
    found: list[tuple[str, str, float, float, bool]] = []
    for span in sorted(detail.spans, key=lambda span: (span[0], span[2])):
        lane, name, start, stop, is_wait = span
        start = max(start, 0.0)  # an update may have begun in the previous step
        if found:
            last = found[-1]
            is_same = (last[0], last[1], last[4]) == (lane, name, is_wait)
            if is_same and start - last[3] < 2e-5:
                found[-1] = (lane, name, last[2], stop, is_wait)
                continue
        found.append((lane, name, start, stop, is_wait))
    return found


def _kind(lane: str, name: str) -> str:
    if lane != "compute":
        return lane if lane in _COLORS else "wait" if lane == "ranks" else "host"
    for kind in ("forward", "backward", "step"):
        if name.startswith((kind, "sum of the step")):
            return kind if name.startswith(kind) else "step"
    return "outside"


def ranks_side_by_side(found: Measured) -> Spec | None:
    shown = zip(found.run.ranks[:64], found.ranks, strict=False)
    rows = []
    for rank, step in shown:
        label = f"rank {rank.run.rank}"
        rows += [
            {"rank": label, "part": part, "ms": s * 1e3, "color": _COLORS.get(part)}
            for part, s in step.places.items()
            if s > 1e-6
        ]
        rows += [
            {"rank": label, "part": f"wait: {WAITS.get(what, what)}", "ms": s * 1e3}
            for what, s in step.waits.items()
            if s > 1e-6
        ]
    spec = bars(rows, "ms", "rank", "part", "milliseconds of a usual step")
    if spec is not None:
        parts = list(dict.fromkeys(str(row["part"]) for row in rows))
        reds = iter(["#d62728", "#ff7f7f", "#8c1d18", "#ffb3b3", "#5c0f0c"])
        greys = iter(["#999999", "#bbbbbb", "#777777", "#dddddd", "#555555", "#aaaaaa"])
        colors = [
            next(reds, "#d62728")
            if part.startswith("wait")
            else _COLORS.get(part) or next(greys, "#999999")
            for part in parts
        ]
        spec["encoding"]["color"]["scale"] = {"domain": parts, "range": colors}
    return spec


def _thinned(steps: Sequence[StepRecord]) -> list[StepRecord]:
    stride = max(math.ceil(len(steps) / _MAX_POINTS), 1)
    return [s for number, s in enumerate(steps) if number % stride == 0 or not s.is_taken]


def over_steps(series: Mapping[str, Sequence[tuple[int, float]]], title: str) -> Spec | None:
    rows = [
        {"step": step, "value": value, "name": name}
        for name, points in series.items()
        for step, value in points
        if math.isfinite(value)
    ]
    if not rows:
        return None
    return _chart(
        140,
        rows,
        title=title,
        mark={"type": "line", "tooltip": True, "point": len(rows) < 40},
        encoding={
            "x": _x("step", "step"),
            "y": _field("value", None, "quantitative", scale={"zero": False}),
            "color": _field("name", legend=_legend() if len(series) > 1 else None),
        },
    )


def loss_series(ranks: Sequence[Rank]) -> list[tuple[int, float]]:
    by_step: dict[int, list[float]] = {}
    for rank in ranks:
        for step in _thinned(rank.steps):
            if step.loss is not None:
                by_step.setdefault(step.step, []).append(step.loss)
    return [(step, sum(losses) / len(losses)) for step, losses in sorted(by_step.items())]


def series_of(rank: Rank, name: str) -> list[tuple[int, float]]:
    points = [(step.step, vars(step)[name]) for step in _thinned(rank.steps)]
    return [(step, float(value)) for step, value in points if value is not None]
