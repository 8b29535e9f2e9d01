"""Every Python example of the READMEs and of docs/ runs as it stands, on one process.

Those that need further libraries run by `nox -s compat`, in compat/checks/test_further_examples.py.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from doc_blocks import find_blocks

from zero_core.testing import run_alone

OWN = ("cpu-adam", "zero-comm", "zero-core", "zero-offload")
"""Packages whose own tests run their READMEs."""
BLOCKS = [
    pytest.param(block.text, id=block.name)
    for block in find_blocks("python")
    if block.page.parent.name not in OWN and not block.needs_further
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
