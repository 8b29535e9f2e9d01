"""Where a DeepSpeed configuration may come from: a dict, a file, a JSON text, or base64 of one.

DeepSpeed reads Hjson. Of that, comments and trailing commas are read here.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from zero_core.errors import ConfigError

__all__ = ["Source", "load"]

Source = Mapping[str, Any] | str | PathLike[str]

_STRING = r'"(?:\\.|[^"\\])*"'
_COMMENT = re.compile(rf"({_STRING})|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"({_STRING})|,(?=\s*[}}\]])")


def load(source: Source) -> dict[str, Any]:
    """The configuration as a dict; the very one, if ``source`` is a dict.

    Raises:
        ConfigError: it cannot be read, or is not a JSON object.
    """
    if isinstance(source, dict):
        return source
    if isinstance(source, Mapping):
        return dict(source)
    text, name = _text_of(source)
    return _parse(text, name)


def _text_of(source: str | PathLike[str]) -> tuple[str, str]:
    """The JSON text and what to call it."""
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return source, "the configuration"
    path = Path(source)
    if _is_file(path):
        try:
            return path.read_text(encoding="utf-8"), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the configuration {path}: {error}") from None
    if isinstance(source, str):
        try:
            return base64.urlsafe_b64decode(source).decode("utf-8"), "the base64 configuration"
        except (binascii.Error, UnicodeError, ValueError):
            pass  # then it was meant as a path
    raise ConfigError(
        f"the configuration {str(source)!r} is neither a file that exists, nor JSON, nor base64 of "
        "JSON: pass a dict or the path of a JSON file"
    )


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # base64 makes too long a name
        return False


def _parse(text: str, name: str) -> dict[str, Any]:
    plain = _TRAILING_COMMA.sub(_kept, _COMMENT.sub(_kept, text))
    try:
        value = json.loads(plain, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name} is not JSON (comments are allowed): {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: expected a JSON object, found {type(value).__name__}")
    return value


def _kept(match: re.Match[str]) -> str:
    return match.group(1) or ""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ConfigError(f"duplicate key {twice[0]!r}: keep one of them")
    return dict(pairs)
