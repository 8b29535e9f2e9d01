"""A part of a program for accelerators: one question to the device.

A row is the result of one case, as JSON. A case without figures has ``failure`` or ``skipped`` with
the reason instead. ``is_met`` is the verdict on the part's bar: null where the bar is not for this
case, or for this device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness.ranks import Row, Runner
from benchmarks.harness.report import Axes


@dataclass(frozen=True)
class Context:
    """The means of a part.

    Attributes:
        device: the measured one. This process allocates nothing there: ``runner`` starts processes
            for that, so that each begins with an empty device.
        is_dry_run: tiny sizes, on the CPU.
        runner: starts processes within the part's time.
        console: for a line per case, as it begins.
        traces: folder for torch.profiler's traces, of this part.
    """

    device: torch.device
    is_dry_run: bool
    runner: Runner
    console: Console
    traces: Path


@dataclass(frozen=True)
class Part:
    """One question to the device, with its bar.

    Attributes:
        name: as `--only` takes it.
        about: one line.
        share: of the remaining time, relative to the parts that are still to run.
        run: measures; returns ``{"rows": {name: row}}`` and figures of all rows together.
        table: of the result of ``run``, short.
        draw: the same as a picture; called if there are rows with figures.
    """

    name: str
    about: str
    share: float
    run: Callable[[Context], Row]
    table: Callable[[Mapping[str, Any]], Table]
    draw: Callable[[Axes, Mapping[str, Any]], None]
