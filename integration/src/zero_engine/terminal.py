"""Options that commands share, their reports on stdout, and their errors on stderr.

Exit codes are listed in docs/command-line.md.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from inspect import Parameter, signature
from typing import Annotated, Any

import typer

from zero_core.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFailedError,
    ConfigError,
    MissingPartError,
    ZeroError,
)

DONE = 0
FAILED = 1
"""The report's answer is no, or an operation failed that may succeed at another attempt."""
MISTAKE = 2
"""The request itself is wrong. Another attempt fails in the same way."""

Text = str | None
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Answer = tuple[Mapping[str, object], str]
"""A report as JSON and as text."""


def option(help_text: str) -> Any:
    return typer.Option(help=help_text, show_default=False)


def reporting(answer: Callable[..., Answer]) -> Callable[..., int]:
    """Return a command that prints the report of ``answer`` and returns the exit code."""

    @functools.wraps(answer)
    def run(*arguments: Any, as_json: bool, **options: Any) -> int:
        try:
            content, text = answer(*arguments, **options)
        except ZeroError as error:
            return refuse(error, as_json=as_json)
        print(json.dumps(content, indent=2) if as_json else text)
        return DONE

    own = signature(answer, eval_str=True)
    json_option = Parameter("as_json", Parameter.KEYWORD_ONLY, default=False, annotation=Json)
    parameters = [*own.parameters.values(), json_option]
    # typer reads a command's options from its signature.
    vars(run)["__signature__"] = own.replace(parameters=parameters)
    return run


def exit_code(error: ZeroError) -> int:
    is_mistake = isinstance(error, ConfigError | CheckpointError)
    return MISTAKE if is_mistake and not isinstance(error, CheckpointFailedError) else FAILED


def refuse(error: ZeroError, *, as_json: bool) -> int:
    """Print ``error`` in place of a report. Returns the exit code: 1 for a damaged checkpoint."""
    is_corrupt = isinstance(error, CheckpointCorruptError)
    if as_json:
        print(json.dumps({"error": str(error), "is_corrupt": is_corrupt}, indent=2))
    else:
        print(f"error: {error}", file=sys.stderr)
    return FAILED if is_corrupt else exit_code(error)


def require(extra: str, user: str, *modules: str) -> None:
    """Raise MissingPartError if one of ``modules``, which the extra installs, is missing."""
    for module in modules:
        if find_spec(module) is None:
            raise MissingPartError(
                f"{user} needs the package {module}, which is not installed: "
                f'pip install "./integration[{extra}]" in a checkout'
            )
