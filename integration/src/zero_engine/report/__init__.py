"""Report of a recorded run: one HTML page, and a trace for Perfetto beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zero_core.errors import ConfigError

MAX_RUNS = 2


def write_report(
    runs: Sequence[str | Path], path: str | Path, *, memory_limit: int | None = None
) -> Path:
    """Write the page about one run, or about two beside each other. Entry point of zero-core.

    Args:
        runs: folders of runs, or of their records.
        path: of the page. The trace of each run is beside it, ``NAME.trace.json``.
        memory_limit: bytes that a rank may take; None: its device's, or its share of the host's.

    Returns:
        The page.

    Raises:
        ConfigError: there are no records, more than two runs, or the page cannot be written.
        MissingPartError: a package that draws is not installed.
    """
    from zero_engine.report.compose import compose
    from zero_engine.report.page import render
    from zero_engine.report.run import read_run
    from zero_engine.report.trace import write_trace

    if not 1 <= len(runs) <= MAX_RUNS:
        raise ConfigError(f"report: expected one run, or two to compare, found {len(runs)}")
    found = [read_run(Path(run)) for run in runs]
    page = Path(path)
    text = render(compose(found, memory_limit))
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
        for number, run in enumerate(found):
            suffix = ".trace.json" if number == 0 else f".{number + 1}.trace.json"
            write_trace(run, page.with_suffix(suffix))
    except OSError as error:
        raise ConfigError(f"report: {page} cannot be written: {error.strerror}") from None
    return page
