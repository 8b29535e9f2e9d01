"""Torch's releases and their builds: requirements, resolution, and what was tested.

    python integration/compat/releases.py resolve
    python integration/compat/releases.py cells [RELEASE]

A **cell** is a release of torch, a build of it (``cpu`` or a CUDA version) and a Python. `TABLE`
has the builds of releases and the results of cells, which `PAGE` shows. The first command resolves
the requirements of all packages in cells. The second prints the cells that CI tests.

The package index has one build of a release, its default. torch's own index, ``TORCH_INDEX``, has
all builds. If it cannot be reached, a cell is resolved with the default, and the result says so.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "integration/src/zero_engine/torch_releases.json"
PAGE = ROOT / "docs/install.md"
INDEX = os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl")
TODAY = datetime.date.today().isoformat()
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PACKAGES = {
    "cpu-adam[torch]": "packages/cpu-adam",
    **{name: f"packages/{name}" for name in ("zero-core", "zero-comm", "zero-offload")},
    "zero-parts[all]": "integration",
}


def read_table() -> dict[str, Any]:
    return json.loads(TABLE.read_text(encoding="utf-8"))


def builds() -> list[tuple[str, str]]:
    """Return each release with each of its builds, torch's nightly builds included."""
    table = read_table()
    of = {**table["torch"], "nightly": table["nightly"]["builds"]}
    return [(torch, name) for torch, names in of.items() for name in names if name[0] == "c"]


def requirements(torch: str, build: str) -> tuple[list[str], list[str]]:
    """Return the requirements for ``build`` of the release ``torch``, and uv's options for them."""
    table = read_table()
    release = table["torch"].get(torch, {})
    # Triton's interpreter of old releases needs an array conversion that NumPy 2.4 removed.
    further = release.get("with", [])
    if build == release.get("default"):
        return [f"torch==={torch}", *further], []  # "==" would admit 2.13.0+cpu
    is_nightly = torch == "nightly"
    pin = table["nightly"]["requirement"] if is_nightly else f"torch=={torch}+{build}"
    index = f"{INDEX}/nightly/{build}" if is_nightly else f"{INDEX}/{build}"
    # By default uv uses the first index that has a package, and torch's index has old NumPys.
    return [pin, *further], ["--index", index, "--index-strategy", "unsafe-best-match"]


@functools.cache
def is_reachable(index: str) -> bool:
    """Return whether ``index`` answers, possibly by an HTTP error, which uv then reports."""
    try:
        urllib.request.urlopen(f"{index}/torch/", timeout=30).close()
    except OSError as error:
        return isinstance(error, urllib.error.HTTPError)
    return True


@functools.cache
def is_resolved(python: str, torch: str, build: str) -> bool:
    """Return whether uv can resolve all packages' requirements in a cell. uv prints conflicts."""
    required, options = requirements(torch, build)
    own = [f"{name} @ {(ROOT / path).as_uri()}" for name, path in PACKAGES.items()]
    target = (f"--python-version={python}", "--python-platform=x86_64-manylinux_2_28")
    # Without this option uv would search for a Python of the target's version.
    running = ("--python", sys.executable)
    command = ("uv", "pip", "compile", "--quiet", "-", *running, *target, *options)
    given = "\n".join([*own, *required])
    run = subprocess.run(command, input=given, text=True, stdout=subprocess.DEVNULL, check=False)
    if run.returncode not in (0, 1):  # 1: no solution
        raise SystemExit(f"uv ended with {run.returncode}, which is no result of a resolution")
    return run.returncode == 0


def resolve() -> int:
    """Resolve all cells of the table. Returns 1 if one has a conflict."""
    table, has_conflict = read_table(), False
    for torch, build in builds():
        release = table["torch"].get(torch)  # None for nightly builds
        for python in PYTHONS if release else ():
            _, options = requirements(torch, build)
            is_default = bool(options) and not is_reachable(options[1])
            used = release["default"] if is_default else build
            end = "resolved" if is_resolved(python, torch, used) else "conflict"
            cell = {end: TODAY} | ({"by": "default build"} if is_default else {})
            print(f"torch {torch}, {build}, Python {python}: {show(cell)}", flush=True)
            run = release[build].get(python, {}).get("run")
            release[build][python] = cell | ({"run": run} if run else {})
            has_conflict |= end == "conflict"
    write(table)
    return int(has_conflict)


def record(
    torch: str, build: str, python: str, arguments: Sequence[str] = (), *, is_passed: bool
) -> None:
    """Record a run of a cell's tests. Nightly runs and runs with ``arguments`` are left out."""
    if torch == "nightly" or arguments:  # nightly builds change daily, arguments may omit tests
        return
    table = read_table()
    run = {"date": TODAY, "passed": is_passed}
    table["torch"][torch][build].setdefault(python, {})["run"] = run
    write(table)


def show(cell: dict[str, Any]) -> str:
    """Return the page's text for a cell of the table."""
    if "run" in cell and "conflict" not in cell:
        return f"{'passed' if cell['run']['passed'] else '**failed**'} {cell['run']['date']}"
    return next(iter(cell), "-") + "*" * ("by" in cell)


def write(table: dict[str, Any]) -> None:
    """Write the table, and a row for each release into the page."""
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    names = sorted({name for _, name in builds()})
    rows = [f"| torch | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for torch, release in table["torch"].items():
        row = [f"{torch} ({release['default']})"]
        for cells in (release.get(name) for name in names):
            pythons: dict[str, list[str]] = {}
            for python in PYTHONS:
                text = "absent" if cells is None else show(cells.get(python, {}))
                pythons.setdefault(text, []).append(python)
            one = len(pythons) == 1
            row.append(", ".join(t if one else f"{t} ({' '.join(p)})" for t, p in pythons.items()))
        rows.append(f"| {' | '.join(row)} |")
    text, _, _ = PAGE.read_text(encoding="utf-8").partition("| torch |")
    PAGE.write_text(text + "\n".join(rows) + "\n", encoding="utf-8")


def print_cells(torch: str = "") -> int:
    """Print all builds on the lowest and the highest Python as JSON, or those of one release."""
    ends = [(t, b, python) for t, b in builds() for python in (PYTHONS[0], PYTHONS[-1])]
    print(json.dumps([f"torch-{t}, {b}, python='{p}'" for t, b, p in ends if t == (torch or t)]))
    return 0


if __name__ == "__main__":
    sys.exit({"resolve": resolve, "cells": print_cells}[sys.argv[1]](*sys.argv[2:]))
