"""Installations leave the installed torch unchanged. Errors name a missing package."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from conftest import CAPTURED, environment

from zero_core.errors import MissingPartError
from zero_core.testing import Case

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("uv") is None, reason="uv prints what it would install")
def test_an_installation_leaves_the_torch_that_is_there() -> None:
    chosen = [*map(str, ROOT.glob("packages/*")), str(ROOT / "integration")]
    command = ("uv", "pip", "install", "--dry-run", "--python", sys.executable, *chosen)
    done = subprocess.run(command, **CAPTURED)
    changes = [line.split()[1] for line in done.stderr.splitlines() if line[:2] in (" +", " -")]
    names = {name.split("==")[0] for name in changes}
    assert {"zero-core", "zero-parts"} <= names, done.stderr
    assert "torch" not in names, done.stderr


TRAINS = """
import torch
from zero_core.testing import Case, batch, make_model
assert not torch.accelerator.is_available()
engine = Case(3, zero={"offload_optimizer": {"device": "cpu"}}).build(model=make_model())
engine.backward(engine(**batch(0, 0, 0))["loss"])
engine.step()
"""


@pytest.mark.cuda
def test_cuda_build_trains_on_a_cpu_where_no_device_is() -> None:
    more = {**environment(), "FAKE_CUDA_DEVICES": "0"}
    done = subprocess.run([sys.executable, "-c", TRAINS], env=more, **CAPTURED)
    assert done.returncode == 0, done.stderr


def test_offload_names_the_folder_of_the_kernel_that_is_missing(monkeypatch):
    def installed(**chosen: str) -> list[Any]:
        return [p for p in entry_points(**chosen) if p.dist and p.dist.name != "cpu-adam"]

    monkeypatch.setattr("zero_core.parts.entry_points", installed)
    monkeypatch.setattr("zero_core.parts.FOUND", {})
    with pytest.raises(MissingPartError, match=r"offload_opt.*pip install packages/cpu-adam"):
        Case(2, zero={"offload_optimizer": {"device": "cpu"}}).build()


def test_pages_and_messages_install_from_a_folder_what_no_package_index_has() -> None:
    pages = ["README.md", "CONTRIBUTING.md", *(str(p) for p in ROOT.glob("docs/**/*.md"))]
    folders = [*ROOT.glob("packages/*"), ROOT / "integration"]
    pages += [str(f / "README.md") for f in folders]
    pages += [str(p) for f in folders for p in (f / "src").rglob("*.py")]
    texts = [(ROOT / page).read_text(encoding="utf-8") for page in pages]
    commands = [line for text in texts for line in re.findall(r"pip install ([^`\n;|)]+)", text)]
    words = {word.strip("\"'") for command in commands for word in command.split()}
    names = {re.split(r"[\[<>=~]", word)[0] for word in words if "/" not in word}
    assert not {name for name in names if re.search("zero|adam", name)}
