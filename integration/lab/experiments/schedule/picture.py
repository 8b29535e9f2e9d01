"""Pictures of a step's lanes."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.harness.report import Axes, Panel
from zero_offload.testing.virtual_time import Span

LANES = ("compute", "down", "host", "up")
COLORS = {
    "forward": "tab:blue",
    "backward": "tab:orange",
    "update": "tab:green",
    "log": "tab:olive",
    "keep": "tab:cyan",
    "undo": "tab:pink",
    "gradient": "tab:red",
    "parameters": "tab:purple",
}


def lane_panel(case: str, spans: Sequence[Span]) -> Panel:

    def draw(axes: Axes) -> None:
        for what, color in COLORS.items():
            for place, lane in enumerate(LANES):
                bars = [
                    (s.start, s.stop - s.start) for s in spans if (s.lane, s.what) == (lane, what)
                ]
                axes.broken_barh(bars, (place - 0.4, 0.8), facecolors=color)
        axes.set_yticks(range(len(LANES)), LANES)
        axes.invert_yaxis()
        axes.set_xlabel("seconds after the end of backward")

    return (case, 6, draw)
