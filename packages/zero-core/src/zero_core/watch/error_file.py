"""Error file of a rank, which torchrun reads."""

from __future__ import annotations

import json
import os
import time
import traceback
from contextlib import suppress
from pathlib import Path


def write_error_file(kind: str, message: str, trace: str = "") -> None:
    """Write an error to ``TORCHELASTIC_ERROR_FILE``, if that is set, for torchrun to read.

    ``trace`` is its traceback. Without one, the file has the stack of the caller.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    line = f"{kind}: {message}"
    details = {
        # All that torchrun prints.
        "py_callstack": trace or "".join([*traceback.format_stack(), line]),
        "timestamp": str(int(time.time())),
    }
    content = {"message": {"message": line, "extraInfo": details}}
    with suppress(OSError):  # the error itself is raised or logged in any case
        Path(path).write_text(json.dumps(content), encoding="utf-8")
