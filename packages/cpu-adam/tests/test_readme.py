"""The README's examples run unchanged."""

from __future__ import annotations

import re
from importlib.metadata import entry_points, metadata, requires
from pathlib import Path

import pytest

import cpu_adam

README = Path(__file__).parent.parent / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_there_are_examples():
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("index", range(len(EXAMPLES)))
def test_example_runs(index, tmp_path, monkeypatch):
    code = EXAMPLES[index]
    if "torch" in code:
        pytest.importorskip("torch", reason="torch is an extra of cpu-adam")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, f"README example {index}", "exec"), {"__name__": "__main__"})


def test_the_entry_point_gives_an_adam_kernel():
    (point,) = entry_points(group="zero_core.adam_kernels", name="cpu")
    assert point.load() is cpu_adam
    assert callable(cpu_adam.adam_step)


def test_the_metadata_is_complete():
    assert metadata("cpu-adam")["Version"] == cpu_adam.__version__
    assert metadata("cpu-adam")["License-Expression"] == "Apache-2.0"
    needed = [line for line in requires("cpu-adam") or [] if "extra ==" not in line]
    assert [re.match(r"[\w-]+", line).group() for line in needed] == ["numpy"]
