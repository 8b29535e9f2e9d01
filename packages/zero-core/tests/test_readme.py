"""The README's examples run."""

from __future__ import annotations

import re
from pathlib import Path


def test_the_examples_of_the_readme_run() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    first, *others = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(others) == 2
    names: dict[str, object] = {}
    exec(compile(first, "README.md", "exec"), names)
    assert names["engine"].global_steps == 1
    for block in others:  # each goes on where the last one ended
        exec(compile(block, "README.md", "exec"), names)
    assert not any(p.is_meta for p in names["model"].parameters())
