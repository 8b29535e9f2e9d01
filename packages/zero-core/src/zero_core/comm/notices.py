"""Notices of a rank: the error file for torchrun, and a progress line on the terminal."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SHOWN_AFTER_S = 1.0
_CLEAR = "\x1b[K"


def write_error_file(kind: str, message: str, trace: str = "") -> None:
    """Write an error to the file ``TORCHELASTIC_ERROR_FILE``, if set, for torchrun to read.

    ``trace`` is the error's traceback. Without one, the caller's stack is written.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    line = f"{kind}: {message}"
    details = {
        # torchrun prints only this entry.
        "py_callstack": trace or "".join([*traceback.format_stack(), line]),
        "timestamp": str(int(time.time())),
    }
    content = {"message": {"message": line, "extraInfo": details}}
    with suppress(OSError):  # the caller raises or logs the error anyway
        Path(path).write_text(json.dumps(content), encoding="utf-8")


@contextmanager
def under_way(what: str, *, rank: int) -> Iterator[None]:
    """Show a progress line for ``what`` on stderr each second.

    Only rank 0 shows it, and only on a terminal.
    """
    stream = sys.stderr
    is_first = rank == 0 and os.environ.get("RANK", "0") == "0"
    if stream is None or not is_first or not stream.isatty():
        yield
        return
    begun, is_over = time.monotonic(), threading.Event()

    def show() -> None:
        while not is_over.wait(SHOWN_AFTER_S):
            # The cursor stays at the line's start, so other output overwrites the line.
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
