"""Python examples of docs/ that need bitsandbytes or torchao run as they stand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from doc_blocks import find_blocks

from zero_core.testing import run_alone

BLOCKS = [
    pytest.param(block.text, id=block.name)
    for block in find_blocks("python")
    if block.needs_further
]


@pytest.mark.parametrize("code", BLOCKS)
def test_example_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_alone(_run, code)


def _run(code: str) -> None:
    exec(compile(code, "example", "exec"), {"__name__": "__main__"})
