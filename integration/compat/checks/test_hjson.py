"""The Hjson reader agrees with the package hjson, which DeepSpeed uses."""

from __future__ import annotations

import json
from typing import Any

import hjson
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_core.errors import ConfigError
from zero_engine.deepspeed.config.hjson import parse_hjson

PIECES = st.sampled_from(
    [
        *("{", "}", "[", "]", ",", ":", "\n", " ", "# x\n", "// y\n", "/* z\n */", "a", "b", "'c'"),
        *('"d"', "1", "-2.5", "5e8", "01", "true", "false", "null", "cpu", "'''x\n y'''"),
        *('"q\\n\\u00e4"', "'it\\'s \"'", "a: 1\n", "b: {", '"e": ', "x y", "http://h", "- 3"),
    ]
)
KEYS = st.text(max_size=3)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # The package writes these strings without quotes, and unquoted they are numbers.
    | st.text().filter(lambda text: text.strip() not in ("NaN", "Infinity", "-Infinity")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("duplicate")
    return dict(pairs)


def _theirs(text: str) -> Any:
    try:
        found = hjson.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, IndexError, OverflowError):
        return None
    return found if isinstance(found, dict) else None


def _ours(text: str) -> Any:
    try:
        return parse_hjson(text, "text")
    except ConfigError:
        return None


@settings(deadline=None, max_examples=1000)
@given(st.lists(PIECES, max_size=14).map("".join).map(lambda inner: f"{{{inner}}}"))
def test_pieces_of_hjson_in_any_order(text: str) -> None:
    assert _ours(text) == _theirs(text)


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(KEYS, VALUES, max_size=4))
def test_json_and_what_the_package_writes(value: dict[str, Any]) -> None:
    for text in (json.dumps(value, indent=1), json.dumps(value), hjson.dumps(value)):
        assert _ours(text) == _theirs(text)
