"""The documentation's Python examples run.

Examples that need further libraries run by `nox -s compat`, in compat/checks.
"""

from __future__ import annotations

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


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_example_runs(block: Block, tmp_path: Path) -> None:
    """It runs as it stands, on one process."""
    run_alone(run_example, block, tmp_path)
