"""The README's examples run, one after another."""

import re
from pathlib import Path


def test_the_examples_of_the_readme_run():
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    # Training, accumulation, freezing, then offload and ranks without data with the last engine.
    steps = [1, 1, 1, 1, 4]
    names = {}
    for block, num in zip(blocks, steps, strict=True):
        exec(compile(block, "README.md", "exec"), names)
        assert names["engine"].global_steps == num
    assert all(p.requires_grad for p in names["model"].parameters())
