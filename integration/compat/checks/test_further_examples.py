"""The Python examples in docs/ that need bitsandbytes or torchao run unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.doc_blocks import Block, find_blocks, run_example
from zero_core.testing import run_alone


@pytest.mark.parametrize(
    "block",
    [block for block in find_blocks("python") if block.needs_further],
    ids=lambda block: block.name,
)
def test_example_runs(block: Block, tmp_path: Path) -> None:
    run_alone(run_example, block, tmp_path)
