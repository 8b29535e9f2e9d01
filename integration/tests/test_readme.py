"""Every Python example of the READMEs and of docs/ runs as it stands, on one process.

Those that need further libraries run by `nox -s compat`, in compat/checks/test_further_examples.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.doc_blocks import Block, find_blocks, run_example
from zero_core.testing import run_alone

OWN = ("cpu-adam", "zero-comm", "zero-core", "zero-offload")
"""Packages whose own tests run their READMEs."""
BLOCKS = [
    block
    for block in find_blocks("python")
    if block.page.parent.name not in OWN and not block.needs_further
]


def test_pages_have_examples_of_every_package() -> None:
    text = "\n".join(block.text for block in BLOCKS)
    for module in ("cpu_adam", "zero_offload", "zero_comm", "zero_core", "zero_engine"):
        assert re.search(rf"^(import|from) .*\b{module}\b", text, re.M), module


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_example_runs(block: Block, tmp_path: Path) -> None:
    run_alone(run_example, block, tmp_path)
