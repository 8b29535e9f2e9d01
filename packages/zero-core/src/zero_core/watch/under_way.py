"""Line on a terminal that says that something takes long."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SHOWN_AFTER_S = 1.0
_CLEAR = "\x1b[K"


@contextmanager
def under_way(what: str, *, rank: int) -> Iterator[None]:
    """Show on stderr that ``what`` is under way, and for how long, once it has taken a second.

    Nothing is shown where stderr is no terminal, and by other ranks than the first.
    """
    stream = sys.stderr
    is_first = rank == 0 and os.environ.get("RANK", "0") == "0"
    if stream is None or not is_first or not stream.isatty():
        yield
        return
    begun, is_over = time.monotonic(), threading.Event()

    def show() -> None:
        while not is_over.wait(SHOWN_AFTER_S):
            # The cursor is at the start: what else is printed overwrites the line.
            stream.write(f"{_CLEAR}{what}: {time.monotonic() - begun:.0f} s\r")
            stream.flush()

    thread = threading.Thread(target=show, name="under_way", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        if time.monotonic() - begun >= SHOWN_AFTER_S:
            stream.write(_CLEAR)
            stream.flush()
