"""Training on real text with the train program's corpus, optimizer, schedule and clipping."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness.report import Axes, Panel
from zero_engine.presets import default_config_text
from zero_engine.train.data import prepare_corpus, read_text
from zero_engine.train.settings import fill_auto

LAST_STEPS = 50
"""Number of last steps whose mean is the training loss."""


@contextmanager
def text_folder(*, vocab: int, context: int) -> Iterator[Path]:
    """Prepare the Python standard library's source as a corpus in a temporary folder."""
    with tempfile.TemporaryDirectory() as scratch:
        prepare_corpus(read_text(None), Path(scratch), vocab_size=vocab, context=context)
        yield Path(scratch)


def training_config(steps: int) -> dict[str, Any]:
    """Return the train program's optimizer, schedule and clipping, for a run of ``steps``."""
    config = fill_auto(json.loads(default_config_text()), steps)
    return {name: config[name] for name in ("optimizer", "scheduler", "gradient_clipping")}


def training_loss(losses: Sequence[float]) -> float:
    return statistics.fmean(losses[-LAST_STEPS:])


def percent_over(value: float, reference: float) -> float:
    """Return how much higher ``value`` is than ``reference``, in percent."""
    return 100.0 * (value / reference - 1.0)


def mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(values) for values in zip(*curves, strict=True)]


def curves(
    title: str,
    label: str,
    named: Sequence[tuple[str, Sequence[float]]],
    colors: Mapping[str, str],
    *,
    steps: int,
    bar_percent: float | None = None,
) -> Panel:
    """Return a panel of named curves over ``steps`` steps, with one color per name.

    ``bar_percent`` draws a band around 0, for curves of differences.
    """

    def draw(axes: Axes) -> None:
        shown: set[str] = set()
        for name, values in named:
            at = [steps * (place + 1) / len(values) for place in range(len(values))]
            about = None if name in shown else name
            axes.plot(at, values, label=about, color=colors[name], linewidth=1)
            shown.add(name)
        if bar_percent is not None:
            axes.axhspan(-bar_percent, bar_percent, color="tab:gray", alpha=0.15)
        axes.set_ylabel(label)
        axes.set_xlabel("step")
        axes.grid(visible=True, alpha=0.3)
        if shown:
            axes.legend()

    return title, 13, draw
