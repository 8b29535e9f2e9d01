"""``zero-engine report``: the page of a run, and its first sentence on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from zero_core.errors import ConfigError
from zero_engine.machine import parse_bytes
from zero_engine.report import write_report
from zero_engine.report.compose import first_sentence
from zero_engine.report.run import read_run


def run_report(runs: Sequence[str], output: str | None, memory: str | None) -> None:
    """Write the page and print where it is.

    Raises:
        ZeroError: a run or an option is not usable.
    """
    limit = None
    if memory is not None:
        limit = parse_bytes(memory)
        if not limit:
            raise ConfigError(f"--memory {memory!r}: expected bytes, as 24GB or 22GiB")
    page = write_report(runs, output or Path(runs[0], "report.html"), memory_limit=limit)
    console = Console()
    for run in runs:
        sentence = first_sentence(read_run(Path(run)), limit)
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)
    console.print(f"written to {page}", highlight=False, markup=False, soft_wrap=True)
