"""The documentation holds: its Python examples run, and docs/errors.md has every error class.

Examples that need further libraries run by `nox -s compat`, in compat/checks.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests.support.doc_blocks import ROOT, Block, find_blocks, run_example
from zero_core.testing import run_alone

OWN = ("cpu-adam", "zero-comm", "zero-core", "zero-offload")
"""Packages whose own tests run their READMEs."""
BLOCKS = [
    block
    for block in find_blocks("python")
    if block.page.parent.name not in OWN and not block.needs_further
]
ROWS = re.findall(
    r"^\| `([\w.]+)\.(\w+)`(?: \(([\w, ]+)\))? \| (.+?) \| (.+?) \|$",
    (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_example_runs(block: Block, tmp_path: Path) -> None:
    """It runs as it stands, on one process."""
    run_alone(run_example, block, tmp_path)


def test_every_error_class_has_one_row_with_its_bases() -> None:
    sources = [*(ROOT / "packages").glob("*/src"), ROOT / "integration" / "src"]
    texts = [
        path.read_text(encoding="utf-8")
        for folder in sources
        for path in folder.rglob("*.py")
        if "testing" not in path.parts
    ]
    defined = {n for t in texts for n in re.findall(r"^class ([A-Z]\w*Error)\b", t, re.MULTILINE)}
    assert sorted(name for _, name, *_ in ROWS) == sorted(defined)
    for module, name, bases, *_ in ROWS:
        found = getattr(importlib.import_module(module), name)
        own = {base.__name__ for base in found.__bases__} - {"ZeroError", "Exception"}
        assert set(filter(None, bases.split(", "))) == own, name
