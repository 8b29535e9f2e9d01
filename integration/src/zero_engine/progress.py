"""Progress of a command on stderr. Imports neither torch nor, without a terminal, rich."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def working(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show on stderr that ``what`` is in progress. Yields a function that shows how much is done.

    ``show(3, 8)`` means three of eight. Shows nothing on ranks above 0 or without a terminal.
    """
    if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress Python's warnings, and log messages up to the level WARNING."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
