"""The exception that ends a script, in the error file that torchrun reads.

torchrun leaves the file to the script (``@record``). Imports only the standard library: see `hook`.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress
from types import TracebackType

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
WRITER = "ZERO_ENGINE_ERROR_FILE_WRITER"
"""The process that may write the file, and its path. Programs that it starts inherit both."""


def record_uncaught() -> None:
    """Have an exception that ends this process written to the error file, if that is this one's."""
    path = os.environ.get(ERROR_FILE, "")
    own = f"{os.getpid()} {path}"
    known = os.environ.get(WRITER, "")
    is_taken = known.endswith(f" {path}") and known != own
    if not path or is_taken:
        return
    os.environ[WRITER] = own
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        shown(kind, error, trace)
        if issubclass(kind, Exception) and own == f"{os.getpid()} {path}":  # not of a fork
            with suppress(ImportError):  # it may be the very error, and has been shown
                from zero_core.watch.error_file import write_error_file

                lines = traceback.format_exception(kind, error, trace)
                write_error_file(kind.__name__, str(error), "".join(lines))

    sys.excepthook = show
