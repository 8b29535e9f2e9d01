"""Exit codes and error messages of commands.

Exit codes are listed in docs/command-line.md.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec

from zero_core import errors

FAILED = 1
"""The report's answer is no, or an operation failed that may succeed at another attempt."""
MISTAKE = 2
"""The request itself is wrong. Another attempt fails in the same way."""


def exit_code(error: errors.ZeroError) -> int:
    is_mistake = isinstance(error, errors.ConfigError | errors.CheckpointError)
    return MISTAKE if is_mistake and not isinstance(error, errors.CheckpointFailedError) else FAILED


def refuse(error: errors.ZeroError, *, as_json: bool) -> int:
    """Print ``error`` in place of a report. Returns the exit code: 1 for a damaged checkpoint."""
    is_corrupt = isinstance(error, errors.CheckpointCorruptError)
    if as_json:
        print(json.dumps({"error": str(error), "is_corrupt": is_corrupt}, indent=2))
    else:
        print(f"error: {error}", file=sys.stderr)
    return FAILED if is_corrupt else exit_code(error)


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def require(extra: str, user: str, *modules: str) -> None:
    """Raise MissingPartError if one of ``modules``, which the extra installs, is missing."""
    for module in modules:
        if find_spec(module) is None:
            raise errors.MissingPartError(
                f"{user} needs the package {module}, which is not installed: "
                f'pip install "./integration[{extra}]" (in a clone of the repository)'
            )
