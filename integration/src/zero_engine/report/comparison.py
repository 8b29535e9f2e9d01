"""Two runs beside each other, axis by axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from zero_core.plan.result import format_bytes
from zero_engine.report import charts
from zero_engine.report.configuration import differences
from zero_engine.report.diagnosis import show_s
from zero_engine.report.measured import WAITS, Measured, RankStep
from zero_engine.report.page import Block, Chart, Table, Text


def compare(first: Measured, second: Measured) -> list[Block]:
    """Return the blocks that compare two runs."""
    names = [str(first.run.folder), str(second.run.folder)]
    rows = [
        [title, *(show(value) for value in values), _change(*values)]
        for title, show, values in _axes(first, second)
    ]
    blocks: list[Block] = [Table(["", *names, "change"], rows)]
    losses = {
        name: charts.loss_series(each.run.ranks)
        for name, each in zip(names, (first, second), strict=True)
    }
    lengths = {
        name: charts.series_of(each.run.ranks[0], "seconds")
        for name, each in zip(names, (first, second), strict=True)
    }
    for title, lines in (("loss", losses), ("seconds of a step", lengths)):
        spec = charts.over_steps(lines, title)
        if spec is not None:
            blocks.append(Chart(spec))
    return [*blocks, *_configurations(first, second, names)]


_Axis = tuple[str, Callable[[float], str], tuple[float, float]]


def _axes(first: Measured, second: Measured) -> Iterator[_Axis]:
    both = (first, second)

    def axis(title: str, show: Callable[[float], str], get: Callable[[Measured], float]) -> _Axis:
        return title, show, (get(first), get(second))

    def size(value: float) -> str:
        return format_bytes(round(value))

    def number(value: float) -> str:
        return f"{value:.4g}"

    yield axis("a step", show_s, lambda m: m.seconds)
    yield axis("samples a second", number, lambda m: m.samples_per_s)
    yield axis("ranks", number, lambda m: m.run.run.world_size)
    yield axis("steps", number, lambda m: m.num_all)
    yield axis("skipped steps", number, lambda m: m.num_skipped)
    yield axis("last loss", number, _last_loss)
    yield axis("peak memory of a rank", size, lambda m: max(r.peak_bytes for r in m.ranks))
    yield axis("bytes sent in a step", size, _sent)
    for name, of_rank in (("", _places), ("waits for ", _waits), ("lane: ", _lanes)):
        tables = [of_rank(each.first) for each in both]
        for key in dict.fromkeys(key for table in tables for key in table):
            values = (tables[0].get(key, 0.0), tables[1].get(key, 0.0))
            yield f"{name}{WAITS.get(key, key)}", show_s, values


def _places(rank: RankStep) -> Mapping[str, float]:
    return rank.places


def _waits(rank: RankStep) -> Mapping[str, float]:
    return rank.waits


def _lanes(rank: RankStep) -> Mapping[str, float]:
    return rank.lanes


def _last_loss(found: Measured) -> float:
    series = charts.loss_series(found.run.ranks)
    return series[-1][1] if series else float("nan")


def _sent(found: Measured) -> float:
    steps = [step for step in found.run.ranks[0].steps if step.sent]
    return float(sum(row[3] + row[4] for row in steps[-1].sent)) if steps else 0.0


def _change(before: float, after: float) -> str:
    if before == after:
        return "="
    return f"{after / before - 1.0:+.0%}" if before else ""


def _configurations(first: Measured, second: Measured, names: Sequence[str]) -> Iterator[Block]:
    one, two = dict(differences(first.run.run)), dict(differences(second.run.run))
    paths = [path for path in {**one, **two} if one.get(path) != two.get(path)]
    if paths:
        rows = [[path, one.get(path, "default"), two.get(path, "default")] for path in paths]
        yield Table(["keys that differ", *names], rows)
    else:
        yield Text("Both have the same configuration.")
