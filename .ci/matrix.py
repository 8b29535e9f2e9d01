"""The results of ``nox -s matrix`` and ``nox -s minimum`` as a page of the documentation.

``python .ci/matrix.py KIND NAME FOLDER`` adds the run whose JUnit files are in FOLDER, with the
versions of this interpreter's environment, and writes the page. Of ``nox -s wheels`` FOLDER holds
the run of ``zero-engine train``.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "benchmarks" / "matrix.json"
PAGE = ROOT / "docs" / "matrix.md"
COUNTS = ("passed", "skipped", "failed")
PARTS = ("cpu-adam", "zero-core", "zero-comm", "zero-offload", "integration")
HEAD = """# Tested releases

    nox -s "matrix(torch-2.15.0-cuda-13.2, python='3.13')"   # another torch or Python
    nox -s minimum      # each package with the lowest releases that it declares
    nox -s wheels       # built, installed where there is no compiler, trained with

These sessions write this page from [their results](benchmarks/matrix.json). CI's other sessions
use the releases in `constraints.txt`. Where the table has no device, the tests ran on the CPU: a
build of torch for CUDA was imported and its kernels for CUDA were not used.

A row is a run of the code of its date. Combinations without a row are not recorded. Failures are
listed by test: those of `test_doc_runs` are commands of these pages, those of `bench` benchmarks.
"""


def count_tests(folder: Path) -> dict[str, Any]:
    """Return counts of the JUnit files in ``folder``, what failed, and why tests were skipped."""
    found: dict[str, Any] = {**dict.fromkeys(COUNTS, 0), "seconds": 0.0}
    failures, reasons = [], {}
    for file in sorted(folder.glob("*.xml")):
        for suite in ElementTree.parse(file).getroot().iter("testsuite"):
            found["seconds"] += float(suite.get("time", 0))
        for case in ElementTree.parse(file).getroot().iter("testcase"):
            outcome, reason = _outcome(case)
            found[outcome] += 1
            if outcome == "failed":
                failures.append(f"{file.stem}: {case.get('classname')}::{case.get('name')}")
            elif outcome == "skipped":
                reasons[reason] = reasons.get(reason, 0) + 1
    found["seconds"] = round(found["seconds"])
    return {**found, "failures": failures, "reasons": reasons}


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    for tag, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        element = case.find(tag)
        if element is not None:
            return outcome, element.get("message", "")
    return "passed", ""


def versions() -> dict[str, str]:
    """Return what this environment is."""
    import torch

    names = ("torch", "triton", "numpy", "pydantic", "safetensors", "transformers", "accelerate")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    device = "" if not torch.cuda.is_available() else torch.cuda.get_device_name(0)
    return {
        "python": platform.python_version(),
        "cuda": str(torch.version.cuda or "-"),
        "device": device,
        "machine": f"{platform.system()} {platform.machine()}",
        **found,
    }


def read() -> dict[str, Any]:
    """Return all rows: "matrix", "minimum" and "wheels", each by name."""
    return dict(json.loads(RESULTS.read_text(encoding="utf-8"))) if RESULTS.exists() else {}


def add(kind: str, name: str, row: Mapping[str, Any]) -> None:
    """Replace the row ``name`` of a ``kind`` by ``row``, with the date, and write the page."""
    found = read()
    dated = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), **row}
    found.setdefault(kind, {})[name] = dated
    RESULTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(page(found), encoding="utf-8")


def page(found: Mapping[str, Any]) -> str:
    """Return the whole page."""
    return "\n".join([HEAD, *_matrix(found), *_minimum(found), *_wheels(found)])


def _table(*columns: str) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]


def _row(*values: Any) -> str:
    return f"| {' | '.join(str(value) for value in values)} |"


def _numbers(row: Mapping[str, Any]) -> list[Any]:
    return [row["date"], *(row[key] for key in COUNTS), _minutes(row["seconds"])]


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


def _matrix(found: Mapping[str, Any]) -> Iterator[str]:
    rows = sorted(found.get("matrix", {}).values(), key=lambda row: _order(row["torch"]))
    yield "## torch and Python\n"
    columns = ("torch", "CUDA", "Python", "device", "transformers", "date", *COUNTS, "time")
    yield from _table(*columns)
    for row in rows:
        keys = ("torch", "cuda", "python", "device", "transformers")
        yield _row(*(row.get(key) or "-" for key in keys), *_numbers(row))
    yield from _details(rows, "torch", "python")


def _details(rows: list[Any], *names: str) -> Iterator[str]:
    for row in rows:
        title = ", ".join(f"{name} {row[name]}" for name in names)
        lines = [f"- failed: `{failure}`" for failure in row["failures"]]
        lines += [
            f"- skipped ({count}): {reason}" for reason, count in sorted(row["reasons"].items())
        ]
        if lines:
            yield f"\n{title}:\n"
            yield from lines
    yield ""


def _minimum(found: Mapping[str, Any]) -> Iterator[str]:
    rows = [{**row, "part": part} for part, row in sorted(found.get("minimum", {}).items())]
    yield "## Lowest versions that each package declares\n"
    yield from _table("package", "torch", "Python", "date", *COUNTS, "time")
    for row in rows:
        yield _row(row["part"], row.get("torch", "-"), row["python"], *_numbers(row))
    missing = [part for part in PARTS if part not in found.get("minimum", {})]
    if missing:
        yield f"\nNot recorded: {', '.join(missing)}."
    yield from _details(rows, "part")


def _wheels(found: Mapping[str, Any]) -> Iterator[str]:
    yield "## Wheels\n"
    for row in found.get("wheels", {}).values():
        yield (
            f"Python {row['python']}, {row['machine']}, {row['date']}. Built in "
            f"{_minutes(row['build_s'])}; `zero-engine[all]` with all that it requires is "
            f"{row['wheelhouse_bytes'] / 1e6:.0f} MB in {row['wheelhouse_files']} files and was "
            f"installed from them alone in {_minutes(row['install_s'])}; `zero-engine train` of "
            f"{row['steps']} steps took {_minutes(row['train_s'])}, loss {row['losses'][0]:.2f} -> "
            f"{row['losses'][1]:.2f}.\n"
        )
        yield from _table("file", "bytes")
        yield from (_row(f"`{name}`", f"{size:,}") for name, size in row["files"].items())
        yield ""


def _order(release: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", release)]


def _training(folder: Path) -> dict[str, Any]:
    """Return what ``nox -s wheels`` left in ``folder``, a run of ``zero-engine train``."""
    found = dict(json.loads((folder / "wheels.json").read_text(encoding="utf-8")))
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
    return {**found, "losses": [losses[0], losses[-1]], "failed": int(losses[-1] >= losses[0])}


def main(kind: str, name: str, folder: str) -> int:
    """Add the run in ``folder``, print its counts, and return 1 if something failed."""
    if kind == "wheels":
        row = _training(Path(folder))
        print(f"loss {row['losses']}")
    else:
        row = count_tests(Path(folder))
        print(f"{name}: {row['passed']} passed, {row['skipped']} skipped, {row['failed']} failed")
    add(kind, name, {**versions(), **row})
    return int(row["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
