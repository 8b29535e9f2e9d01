"""The rows of a table, and what a run that was interrupted has done of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import report
from cases import Case

from benchmarks.harness.ranks import write_json

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("packages/*/src", "packages/*/native", "integration/src", "integration/compat")


class Rows:
    """Rows by case, written to ``results`` one by one.

    A run begins anew, unless the one before did not come to its end: a row of that one is kept if
    its fingerprint is the same, which is made from the case, the sources, the installed packages
    and ``settings``.
    """

    def __init__(self, results: Path, pack: Sequence[Case], settings: object) -> None:
        self._results, self._running = results, results.with_suffix(".running.json")
        known = _read(results)
        self.found: dict[str, Any] = {c.key: known[c.key] for c in pack if c.key in known}
        self._done: dict[str, str] = _read(self._running)
        self._conditions = json.dumps([settings, _sources(), _installed()])

    def forget(self, cases: Sequence[Case]) -> None:
        """Let no later run keep the rows of ``cases``."""
        keys = {case.key for case in cases}
        self._done = {key: value for key, value in self._done.items() if key not in keys}
        if self._done:
            write_json(self._running, self._done)
        else:
            self._running.unlink(missing_ok=True)

    def is_done(self, case: Case) -> bool:
        """Whether the run that goes on here has the row of ``case``."""
        return case.key in self.found and self._done.get(case.key) == self._fingerprint(case)

    def is_good(self, case: Case) -> bool:
        """Whether there is a row of ``case``, of any run, and its losses are the reference's."""
        return case.key in self.found and report.is_good(self.found[case.key])

    def add(self, case: Case, row: dict[str, Any]) -> None:
        """Write a row that is over."""
        self.found[case.key] = row
        self._done[case.key] = self._fingerprint(case)
        write_json(self._results, self.found)
        write_json(self._running, self._done)

    def _fingerprint(self, case: Case) -> str:
        text = json.dumps(asdict(case), sort_keys=True) + self._conditions
        return hashlib.sha256(text.encode()).hexdigest()


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _sources() -> str:
    digest = hashlib.sha256()
    folders = [folder for pattern in SOURCES for folder in sorted(ROOT.glob(pattern))]
    for path in (path for folder in folders for path in sorted(folder.rglob("*"))):
        if path.is_file() and path.suffix in {".py", ".cpp", ".h", ".inl"}:
            digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _installed() -> list[str]:
    return sorted({f"{found.name} {found.version}" for found in distributions()})
