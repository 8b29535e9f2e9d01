"""Every Python example of the READMEs and of docs/ runs as it stands, on one process."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from zero_core.testing import run_alone

ROOT = Path(__file__).parents[2]
BLOCKS = [
    pytest.param(match.group(1), id=f"{path.parent.name}-{path.stem}-{number}")
    for path in (
        ROOT / "README.md",
        ROOT / "integration" / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
    )
    for number, match in enumerate(
        re.finditer(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S)
    )
]


def test_readme_has_examples_of_every_package() -> None:
    text = "\n".join(str(block.values[0]) for block in BLOCKS)
    for module in ("cpu_adam", "zero_offload", "zero_comm", "zero_core", "zero_engine"):
        assert re.search(rf"^(import|from) .*\b{module}\b", text, re.M), module


@pytest.mark.parametrize("code", BLOCKS)
def test_example_runs(code: str, tmp_path: Path) -> None:
    run_alone(_run, code, str(tmp_path))


def _run(code: str, folder: str) -> None:
    os.chdir(folder)
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
