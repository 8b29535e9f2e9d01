"""The README's example runs and does what its comments say."""

from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs() -> None:
    _, _, rest = README.read_text().partition("```python\n")
    code, _, _ = rest.partition("```")
    names: dict[str, Any] = {}
    exec(code, names)
    numel = names["weights"].numel()
    assert round(names["packed"].numel() / numel, 3) == 1.008
    assert names["full"].equal(names["again"])
    assert (names["full"] - names["weights"]).abs().max() < 0.04
