"""What every part of the program is, and what it is given.

A row is what one case of a part found, as JSON. A case without figures has ``failure`` or
``skipped`` with the reason instead. ``is_met`` holds it against the part's bar: null where the bar
is not for this case, or for this device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table

from zero_engine.bench.offload_cuda.jobs import Runner

__all__ = ["Context", "Part", "Row"]

Row = dict[str, Any]


@dataclass(frozen=True)
class Context:
    """What a part may use.

    Attributes:
        device: of what is measured. This process allocates nothing there: whatever does runs in
            a process that ``runner`` starts, so that it begins with an empty device.
        is_dry_run: tiny sizes, on the CPU.
        runner: starts processes within the part's time, and makes a row of what becomes of them.
        console: for a line per case, as it begins.
        traces: folder for what torch.profiler recorded, a subfolder per part.
    """

    device: torch.device
    is_dry_run: bool
    runner: Runner
    console: Console
    traces: Path


@dataclass(frozen=True)
class Part:
    """One question to the device.

    Attributes:
        name: as `--only` takes it.
        about: one line.
        share: of the time that is left, relative to the other parts that are still to run.
        run: measures; returns ``{"rows": {name: row}}`` and what belongs to all rows.
        table: what ``run`` returned, short.
        draw: the same as a picture; not called without rows that have figures.
    """

    name: str
    about: str
    share: float
    run: Callable[[Context], Row]
    table: Callable[[Mapping[str, Any]], Table]
    draw: Callable[[Axes, Mapping[str, Any]], None]
