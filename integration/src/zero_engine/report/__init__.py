"""Report of a recorded run: one HTML page."""

from __future__ import annotations

from pathlib import Path

from zero_core.errors import ConfigError
from zero_engine.terminal import require


def write_report(run: str | Path, path: str | Path, *, memory_limit: int | None = None) -> Path:
    """Write an HTML page about a run. zero-core calls it by entry point. Needs the extra "report".

    ``run`` is the folder of the run, or of its records. ``memory_limit`` is the bytes that a rank
    may use. None means the memory of its device, or its share of the host's.

    Raises:
        ConfigError: there are no records, or the page cannot be written.
    """
    require("report", "a report", "jinja2", "vl_convert")
    from zero_engine.report.compose import compose
    from zero_engine.report.page import render
    from zero_engine.report.run import read_run

    page = Path(path)
    text = render(compose(read_run(Path(run)), memory_limit))
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"report: {page} cannot be written: {error.strerror}") from None
    return page
