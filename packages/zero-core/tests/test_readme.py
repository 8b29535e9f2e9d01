"""The README's examples run, one after another."""

from __future__ import annotations

import re
from pathlib import Path


def test_the_examples_of_the_readme_run() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == 3  # training, accumulation, freezing
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
        assert names["engine"].global_steps == 1
    assert all(p.requires_grad for p in names["model"].parameters())
