"""DeepSpeed's configuration files: JSON as people write it, or Hjson by the package hjson.

JSON may have comments, a comma before a closing bracket, and none at the end of a line. Hjson
(https://hjson.github.io) also has keys and strings without quotes, and strings over several lines.
DeepSpeed reads it by the same package.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from importlib.util import find_spec
from typing import Any

from zero_core.errors import ConfigError

_STRING = r'("(?:\\.|[^"\\])*")'
_IGNORED = re.compile(rf"{_STRING}|#[^\r\n]*|//[^\r\n]*|/\*.*?\*/", re.DOTALL)
_LAST_COMMA = re.compile(rf"{_STRING}|(?<=[^{{\[\s])\s*,(?=\s*[}}\]])")
_NO_COMMA = re.compile(rf"(?:{_STRING}|[}}\]\w])(?=[^\S\n]*\n\s*\")")


def _number(text: str) -> int | float:
    """Return a whole number below 1e10 as an int, as the package hjson does."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 1e10 else value


def parse_hjson(text: str, name: str) -> dict[str, Any]:
    """Parse the text of an object. Error messages call it ``name``."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for key, number in Counter(key for key, _ in pairs).items():
            if number > 1:
                raise ConfigError(f"{name}: duplicate key {key!r}: keep one of them")
        return dict(pairs)

    text = plain = text.removeprefix("\ufeff")
    for ignored in (_IGNORED, _LAST_COMMA):  # keeps lines and columns
        plain = ignored.sub(lambda found: found[1] or re.sub(r"[^\r\n]", " ", found[0]), plain)
    plain = _NO_COMMA.sub(r"\g<0>,", plain)
    try:
        try:
            value = json.loads(plain, object_pairs_hook=unique, parse_float=_number)
        except json.JSONDecodeError as error:
            if find_spec("hjson") is None:
                hint = 'to read Hjson: pip install "hjson>=3.1"'
                raise ConfigError(f"{name} is not JSON: {error}; {hint}") from None
            import hjson

            value = hjson.loads(text, object_pairs_hook=unique)
    except ConfigError:
        raise
    except (ValueError, IndexError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{name} is neither JSON nor Hjson: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: expected an object of keys, found {str(value)[:40]!r}")
    return value
