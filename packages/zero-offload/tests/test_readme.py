"""The README's examples run as printed."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import torch

README = Path(__file__).parents[1] / "README.md"


def test_examples_run_and_the_first_has_five_lines() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len([line for line in blocks[0].splitlines() if line]) == 5
    names: dict[str, Any] = {}
    for block in blocks:
        if 'adam_kernel="cpu"' in block and importlib.util.find_spec("cpu_adam") is None:
            continue  # needs the optional cpu-adam
        exec(compile(block, str(README), "exec"), names)
        assert torch.isfinite(names["model"].weight).all()
        state = names["opt"].state_dict()["state"]
        assert [entry["num_steps"] for entry in state.values()] == [1, 1]
