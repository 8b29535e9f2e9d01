"""Parser of Hjson (https://hjson.github.io), the format of DeepSpeed's configuration.

Hjson is JSON with comments (``#``, ``//``, ``/* */``), keys and strings without quotes, strings in
single quotes or over several lines (three single quotes), and a comma or a newline between members.
A string without quotes ends at the end of its line, and may contain commas and brackets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from zero_core.config import MAX_DEPTH
from zero_core.errors import ConfigError

_SPACE = re.compile(r"(?:[ \t\r\n]+|#[^\r\n]*|//[^\r\n]*|/\*.*?\*/)*", re.DOTALL)
_QUOTED = re.compile(
    r"""(?P<quote>["'])(?P<inner>(?:\\.|(?!(?P=quote))[^\\\x00-\x1f])*)(?P=quote)"""
)
_KEY = re.compile(r"[^{}\[\],:\s]+")
_WORD = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null|-?Infinity|NaN")
_WORD_END = re.compile(r"[ \t]*(?=[,}\]#\r\n]|//|/\*|\Z)")
_LINE = re.compile(r"[^\r\n]*")
_LONG_QUOTE = "'''"
_LARGEST_WHOLE = 1e10
"""Magnitude below which whole numbers written with a fraction or exponent become ints."""
_MAX_DIGITS = 400


def parse_hjson(text: str, name: str) -> dict[str, Any]:
    """Parse an Hjson object. Its outer braces may be missing. Error messages call it ``name``."""
    return _Reader(text.removeprefix("\ufeff"), name).read()


class _Reader:
    def __init__(self, text: str, name: str) -> None:
        self._text = text
        self._name = name
        self._at = 0
        self._depth = 0

    def read(self) -> dict[str, Any]:
        first = self._next()
        if first == "[":
            self._fail("expected an object of keys, found an array")
        value = self._object(is_braced=first == "{")
        if self._next():
            self._fail(f"expected the end, found {self._rest()}")
        return value

    def _value(self) -> Any:
        first = self._next()
        if first and first in "{[":
            self._depth += 1
            if self._depth > MAX_DEPTH:
                self._fail(f"nested more than {MAX_DEPTH} deep")
            if first == "{":
                value: Any = self._object()
            else:
                value = [self._value() for _ in self._members("array", "]")]
            self._depth -= 1
            return value
        if self._text.startswith(_LONG_QUOTE, self._at):
            return self._long_string()
        if first in ('"', "'") and first:
            return self._quoted()
        if first in "},]:":  # also at the end, where ``first`` is ""
            self._fail(f"expected a value, found {self._rest()}")
        # A number, a constant, or a string without quotes.
        found = _WORD.match(self._text, self._at)
        end = _WORD_END.match(self._text, found.end()) if found else None
        if found is None or end is None:
            line = _LINE.match(self._text, self._at)
            assert line is not None
            self._at = line.end()
            return line[0].strip()
        self._at = end.end()
        if len(found[0]) > _MAX_DIGITS:
            self._fail(f"a number of {len(found[0])} characters")
        value = json.loads(found[0])
        if isinstance(value, float) and value.is_integer() and abs(value) < _LARGEST_WHOLE:
            return int(value)
        return value

    def _object(self, *, is_braced: bool = True) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for place in self._members("object", "}" if is_braced else ""):
            if self._text[self._at] in "\"'":
                key = self._quoted()
            elif (word := _KEY.match(self._text, self._at)) is None:
                self._fail(f"expected a key, found {self._rest()}")
            else:
                key, self._at = word[0], word.end()
            if key in found:
                self._fail(f"duplicate key {key!r}: keep one of them", place)
            if self._next() != ":":
                self._fail(f"expected ':' after the key {key!r}, found {self._rest()}")
            self._at += 1
            found[key] = self._value()
        return found

    def _members(self, what: str, close: str) -> Iterator[int]:
        """Move through the brackets and commas of ``what``. Yields the start of each member."""
        begin = self._at
        self._at += len(close)
        while (first := self._next()) != close:
            if not first:
                self._fail(f"the {what} that begins here has no '{close}'", begin)
            yield self._at
            if self._next() == ",":
                self._at += 1
        self._at += len(close)

    def _quoted(self) -> str:
        found = _QUOTED.match(self._text, self._at)
        if found is None:
            self._fail("the string that begins here has no end on its line")
        # JSON has no escape for single quotes, and requires one for double quotes.
        plain = {"\\'": "'", '"': '\\"'}
        inner = re.sub(r'\\.|"', lambda match: plain.get(match[0], match[0]), found["inner"])
        try:
            value: str = json.loads(f'"{inner}"')
        except json.JSONDecodeError as error:
            self._fail(f"{error.msg} in the string {found[0]}")
        self._at = found.end()
        return value

    def _long_string(self) -> str:
        begin = self._at
        indent = begin - (self._text.rfind("\n", 0, begin) + 1)
        end = self._text.find(_LONG_QUOTE, begin + 3)
        if end < 0:
            self._fail(f"the string that begins here has no {_LONG_QUOTE}")
        self._at = end + 3
        first, *others = self._text[begin + 3 : end].replace("\r", "").split("\n")
        first = first.lstrip(" \t")
        lines = [re.sub(rf"\A[ \t]{{0,{indent}}}", "", line) for line in others]
        if not first and lines:
            return "\n".join(lines).removesuffix("\n")
        return "\n".join([first, *lines]).removesuffix("\n")

    def _next(self) -> str:
        space = _SPACE.match(self._text, self._at)
        assert space is not None
        self._at = space.end()
        return self._text[self._at : self._at + 1]

    def _rest(self) -> str:
        line = _LINE.match(self._text, self._at)
        assert line is not None
        text = line[0].rstrip()
        return repr(text if len(text) <= 40 else f"{text[:37]}...") if text else "the end"

    def _fail(self, problem: str, at: int | None = None) -> NoReturn:
        place = self._at if at is None else at
        line = self._text.count("\n", 0, place) + 1
        column = place - self._text.rfind("\n", 0, place)
        raise ConfigError(f"{self._name}, line {line}, column {column}: {problem}")
