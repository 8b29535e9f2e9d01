"""Output of a command: its report on stdout, as text or JSON; progress and errors on stderr.

Exit codes are listed in docs/command-line.md.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from zero_core.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFailedError,
    ConfigError,
    ZeroError,
)

DONE = 0
FAILED = 1
"""The report's answer is no, or something failed that another attempt may get past."""
MISTAKE = 2
"""The request cannot be carried out as it stands. Another attempt ends in the same way."""


def exit_code(error: ZeroError) -> int:
    """Return the code with which a program ends because of ``error``."""
    is_mistake = isinstance(error, ConfigError | CheckpointError)
    return MISTAKE if is_mistake and not isinstance(error, CheckpointFailedError) else FAILED


def say(content: Mapping[str, object], text: str, *, as_json: bool) -> None:
    """Print a report."""
    print(json.dumps(content, indent=2) if as_json else text)


def refuse(error: ZeroError, *, as_json: bool) -> int:
    """Print why there is no report. Returns the exit code, which is 1 for a damaged checkpoint."""
    is_corrupt = isinstance(error, CheckpointCorruptError)
    if as_json:
        print(json.dumps({"error": str(error), "is_corrupt": is_corrupt}, indent=2))
    else:
        print(f"error: {error}", file=sys.stderr)
    return FAILED if is_corrupt else exit_code(error)


@contextmanager
def working(what: str) -> Iterator[Callable[..., None]]:
    """Show on stderr that ``what`` is under way, and for how long.

    Nothing is shown where stderr is no terminal, and by ranks other than the first.

    Yields:
        A function that shows how much is done: ``show(completed=3, total=8)``.
    """
    console = Console(stderr=True)
    is_shown = console.is_terminal and os.environ.get("RANK", "0") == "0"
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not is_shown
    ) as progress:
        yield partial(progress.update, progress.add_task(what, total=None))


@contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings of imported libraries off the screen, in a command that only reports."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
