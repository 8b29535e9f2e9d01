"""docs/errors.md has every error class once, with the bases that it has."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = re.findall(
    r"^\| `([\w.]+)\.(\w+)`(?: \(([\w, ]+)\))? \| (.+?) \| (.+?) \|$",
    (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


def _defined() -> set[str]:
    """Names of the public classes of the sources whose name ends in Error."""
    folders = [*(ROOT / "packages").glob("*/src"), ROOT / "integration" / "src"]
    return {
        name
        for folder in folders
        for path in folder.rglob("*.py")
        if "testing" not in path.parts
        for name in re.findall(
            r"^class ([A-Z]\w*Error)\b", path.read_text(encoding="utf-8"), re.MULTILINE
        )
    }


def test_every_error_class_has_one_row() -> None:
    assert sorted(name for _, name, *_ in ROWS) == sorted(_defined())


def test_rows_name_what_else_a_class_is() -> None:
    for module, name, bases, *_ in ROWS:
        found = getattr(importlib.import_module(module), name)
        own = {base.__name__ for base in found.__bases__} - {"ZeroError", "Exception"}
        assert set(filter(None, bases.split(", "))) == own, name
