"""The install lines of the documentation, from a fresh clone.

The quick start's line is run in a new environment, and what it installs trains there. Libraries of
others are those of this environment, by a ``.pth`` file: `nox -s wheels` installs them, too. Other
lines are resolved by ``pip install --dry-run``, which prepares the packages' metadata. What builds
the packages comes from a package index.
"""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest
from doc_blocks import PAGES, ROOT, find_blocks
from doc_runs import commands, is_install

from faults.harness import ENVIRONMENT

QUICK_START = next(
    command for b in find_blocks("bash") if b.page.stem == "index" for command in commands(b)
)
INLINE = re.compile(r"`(pip install [^`]*(?:packages/|\./)[^`]*)`")
OWN_FOLDER = re.compile(r"[ \"]\.[\[\"]")
"""Matches `.[test]`, which a package's README has."""
OFFLINE = "pip install --no-index --no-deps "
"""Begins the lines of a machine without a network, to which a reader has carried wheels."""
PACKAGES = ("cpu_adam", "zero_core", "zero_offload", "zero_comm", "zero_engine")
LINES = {
    (command, b.page.parent if OWN_FOLDER.search(command) else ROOT)
    for b in find_blocks("bash")
    for line in commands(b)
    for command in line.split(" && ")
    if is_install(command) and not command.startswith(OFFLINE)
} | {(line, ROOT) for page in PAGES for line in INLINE.findall(page.read_text(encoding="utf-8"))}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a fresh clone with an environment in ``.venv`` that has none of the packages."""
    folder = tmp_path_factory.mktemp("user") / "clone"
    subprocess.run(["git", "clone", "--quiet", "--no-tags", str(ROOT), str(folder)], check=True)
    venv.create(folder / ".venv", with_pip=True)
    found = sysconfig.get_path("purelib", vars={"base": str(folder / ".venv")})
    Path(found, "others.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return folder


def _run(command: str, folder: Path, clone: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    programs = f"{clone / '.venv' / 'bin'}:{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**environment, **ENVIRONMENT, "PATH": programs},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(clone: Path) -> Path:
    """Install by the quick start's line and return the clone."""
    _run(QUICK_START, clone, clone)
    return clone


def test_quick_start_installs_all_five_in_the_new_environment(installed: Path) -> None:
    code = f"import {', '.join(PACKAGES)}\n"
    code += f"print(*(one.__file__ for one in ({', '.join(PACKAGES)})), sep='\\n')"
    files = _run(f'python -c "{code}"', installed.parent, installed).splitlines()
    assert len(files) == len(PACKAGES)
    assert all(Path(file).is_relative_to(installed / ".venv") for file in files), files


def test_quick_start_trains_there(installed: Path, tmp_path: Path) -> None:
    start = next(b.text for b in find_blocks("python") if b.page.stem == "index")
    (tmp_path / "train.py").write_text(start, encoding="utf-8")
    assert "loss " in _run("python train.py", tmp_path, installed)
    options = "--steps=10 --layers=2 --width=32 --heads=2 --vocab=300 --ranks=2 --output=mine"
    _run(f"zero-engine train {options}", tmp_path, installed)
    assert (tmp_path / "mine" / "hf" / "model.safetensors").is_file()


@pytest.mark.parametrize(("line", "folder"), sorted(LINES - {(QUICK_START, ROOT)}), ids=str)
def test_install_line_resolves(line: str, folder: Path, installed: Path) -> None:
    """Packages of this repository are among what pip would install, from their folders."""
    said = _run(f"{line} --dry-run", installed / folder.relative_to(ROOT), installed)
    assert "Would install" in said or "accelerate" in line
