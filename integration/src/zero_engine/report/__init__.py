"""Report of a recorded run: one HTML page, and its first sentence on the screen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zero_core.errors import ConfigError
from zero_engine.progress import quiet, working
from zero_engine.terminal import Answer, Text, option, reporting, require


def write_report(run: str | Path, path: str | Path, *, memory_limit: int | None = None) -> Path:
    """Write the page about a run. Entry point of zero-core. Needs the extra "report".

    ``run`` is the folder of the run, or of its records. ``memory_limit`` is the bytes that a rank
    may take. None: its device's, or its share of the host's.

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


@reporting
def report(
    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)],
    output: Annotated[Text, option("The page. Default: report.html in the run.")] = None,
    memory: Annotated[Text, option("Memory that a rank may take, e.g. 24GB or 22GiB.")] = None,
) -> Answer:
    """Write an HTML page about a recorded run: what limits it, and what to change."""
    from zero_engine.machine import parse_bytes
    from zero_engine.report.compose import first_sentence
    from zero_engine.report.run import read_run

    limit = None if memory is None else parse_bytes(memory, "--memory")
    with working("report"), quiet():
        page = write_report(run, output or Path(run, "report.html"), memory_limit=limit)
        sentence = first_sentence(read_run(Path(run)), limit)
    text = f"{sentence}\nwritten to {page}: open it in a browser"
    return {"page": str(page), "sentence": sentence}, text
