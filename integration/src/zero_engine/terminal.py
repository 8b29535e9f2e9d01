"""Output of a command: its report on stdout as text or JSON, and errors on stderr.

Exit codes are listed in docs/command-line.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

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
