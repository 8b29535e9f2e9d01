"""Sources of a DeepSpeed configuration: a dict, a file, a JSON text, or base64 of one.

DeepSpeed reads Hjson. Of that, comments and trailing commas are read here.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from zero_core.config.schema import parse_json
from zero_core.errors import ConfigError

Source = Mapping[str, Any] | str | PathLike[str]

_STRING = r'"(?:\\.|[^"\\])*"'
_COMMENT = re.compile(rf"({_STRING})|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING_COMMA = re.compile(rf"({_STRING})|,(?=\s*[}}\]])")


def load(source: Source) -> dict[str, Any]:
    """Return the configuration as a dict: ``source`` itself if it is one.

    Raises:
        ConfigError: it cannot be read, or is not a JSON object.
    """
    if isinstance(source, dict):
        return source
    if isinstance(source, Mapping):
        return dict(source)
    text, name = _text_of(source)
    plain = _TRAILING_COMMA.sub(_kept, _COMMENT.sub(_kept, text))
    return parse_json(plain, name)


def _text_of(source: str | PathLike[str]) -> tuple[str, str]:
    """Return the JSON text and a name for messages."""
    if isinstance(source, str) and source.lstrip().startswith("{"):
        return source, "the configuration"
    path = Path(source)
    if os.path.isfile(path):  # False where base64 makes too long a name
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


def _kept(match: re.Match[str]) -> str:
    return match.group(1) or ""
