"""The run's two pictures, drawn from its JSON log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zero_engine.train.metrics import MIB


def plot_loss(entries: Sequence[dict[str, Any]], path: Path) -> None:
    """Training and held-out loss over steps, as a PNG at ``path``."""
    axes = _axes("loss (nats per token)")
    for key, label, style in (("loss", "training", "-"), ("held_out_loss", "held out", "o-")):
        points = [(entry["step"], entry[key]) for entry in entries if key in entry]
        axes.plot([x for x, _ in points], [y for _, y in points], style, label=label, markersize=4)
    _save(axes, path)


def plot_memory(entries: Sequence[dict[str, Any]], path: Path) -> None:
    """Memory of each rank over steps, as a PNG at ``path``."""
    axes = _axes("memory (MiB)")
    points = [(entry["step"], entry["memory_bytes"]) for entry in entries if "loss" in entry]
    for rank in range(len(points[0][1]) if points else 0):
        values = [memory[rank] / MIB for _, memory in points if rank < len(memory)]
        axes.plot([x for x, memory in points if rank < len(memory)], values, label=f"rank {rank}")
    axes.set_ylim(bottom=0)
    _save(axes, path)


def _axes(label: str) -> Axes:
    # A Figure of its own needs no display and leaves no state behind, as pyplot would.
    axes = Figure(figsize=(8, 4.5), layout="constrained").add_subplot()
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    axes.grid(visible=True, alpha=0.3)
    return axes


def _save(axes: Axes, path: Path) -> None:
    if axes.get_lines():
        axes.legend()
    figure = axes.figure
    assert isinstance(figure, Figure)
    figure.savefig(path, dpi=120)
