"""The page of the pack of public scripts is what the program writes from the results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_page_is_made_from_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "integration" / "compat"))
    import report
    from families import PACK, PLANNED

    found = json.loads((DOCS / "benchmarks" / "compat.json").read_text(encoding="utf-8"))
    assert found.keys() <= {case.key for case in PACK}
    page = report.page(report.HEAD, PACK, PLANNED, found)
    assert page == (DOCS / "compat.md").read_text(encoding="utf-8"), "write it with --failed"
