"""``zero-engine report``: the page of a run, and its first sentence on the screen."""

from __future__ import annotations

from pathlib import Path

from zero_core.errors import ZeroError
from zero_engine.machine import parse_bytes
from zero_engine.progress import quiet, working
from zero_engine.report import write_report
from zero_engine.report.compose import first_sentence
from zero_engine.report.run import read_run
from zero_engine.terminal import DONE, refuse, say


def run_report(run: str, output: str | None, memory: str | None, *, as_json: bool) -> int:
    """Write the page and print where it is. Returns the exit code."""
    try:
        limit = None if memory is None else parse_bytes(memory, "--memory")
        with working("report"), quiet():
            page = write_report(run, output or Path(run, "report.html"), memory_limit=limit)
            sentence = first_sentence(read_run(Path(run)), limit)
    except ZeroError as error:
        return refuse(error, as_json=as_json)
    text = f"{sentence}\nwritten to {page}: open it in a browser"
    say({"page": str(page), "sentence": sentence}, text, as_json=as_json)
    return DONE
