"""The examples are short, and run by the commands that stand in them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from conftest import run_documented
from doc_blocks import ROOT, documented_arguments

EXAMPLES = sorted((ROOT / "integration" / "examples").glob("*.py"))
# test_cluster_recipes runs the one of FSDP2; `nox -s nightly -- examples` runs all, with Ray.
HERE = [path for path in EXAMPLES if path.stem == "lightning_example"]


def _command(path: Path) -> str:
    """The second paragraph of its docstring."""
    description = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert description is not None
    return description.split("\n\n")[1]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short_and_asserts_that_its_loss_falls(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
    assert any(line.strip().startswith("assert ") for line in lines)
    assert str(path) in documented_arguments(_command(path))


@pytest.mark.parametrize("path", HERE, ids=lambda path: path.stem)
def test_loss_falls(path: Path, tmp_path: Path) -> None:
    assert "loss " in run_documented(_command(path), folder=tmp_path).stdout
