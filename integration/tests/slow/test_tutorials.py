"""Each tutorial's command trains, checks itself, and prints the bytes that the page shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import run_documented
from doc_blocks import ROOT, find_blocks

FOLDER = ROOT / "integration" / "examples" / "tutorials"
SCRIPTS = {
    "zero": "zero.py",
    "zero-offload": "offload.py",
    "twin-flow": "twin_flow.py",
    "zeropp": "zeropp.py",
}
BLOCKS = {page: [b for b in find_blocks() if b.page.stem == page] for page in SCRIPTS}
BYTES = re.compile(r"^(.*?) {2,}[\d.]+ -> [\d.]+ +(\d+) +(\d+) +(\d+) +(\d+)$", re.M)
"""A line of `lesson.show`, but for its losses, which may differ between machines."""


def _sizes(text: str) -> dict[str, list[int]]:
    return {name: [int(size) for size in sizes] for name, *sizes in BYTES.findall(text)}


@pytest.mark.parametrize("page", SCRIPTS)
def test_page_shows_the_configuration_of_its_script(page: str) -> None:
    config = json.loads((FOLDER / SCRIPTS[page]).with_suffix(".json").read_text(encoding="utf-8"))
    assert config in [json.loads(b.text) for b in BLOCKS[page] if b.language == "json"]


@pytest.mark.parametrize("page", SCRIPTS)
def test_command_of_a_tutorial_trains_and_prints_what_the_page_shows(
    page: str, tmp_path: Path
) -> None:
    (command,) = (b.text for b in BLOCKS[page] if b.language == "bash" and SCRIPTS[page] in b.text)
    assert command.startswith("torchrun ")
    picture = tmp_path / "picture.png"
    drawn = [f"--plot={picture}"] if page == "zero-offload" else []  # matplotlib takes a second
    done = run_documented(command, *drawn, "--steps=4", folder=tmp_path)
    (shown,) = (b.text for b in BLOCKS[page] if b.language == "text")
    printed, expected = _sizes(done.stdout), _sizes(shown)
    assert printed.keys() == expected.keys() != set()
    # Messages of few bytes carry the number of the step.
    assert all(printed[name] == pytest.approx(expected[name], rel=0.02) for name in printed)
    assert not drawn or picture.stat().st_size > 5000
