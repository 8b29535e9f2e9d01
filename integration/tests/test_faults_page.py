"""The page of the faults is what ``nox -s faults`` writes from its counts."""

from __future__ import annotations

from pathlib import Path

import pytest

FAULTS = Path(__file__).parents[1] / "faults"


def test_page_is_made_from_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FAULTS))
    import faults_page

    page = faults_page.PAGE.read_text(encoding="utf-8")
    assert page == faults_page.page(faults_page.read()), "write it with nox -s faults"
