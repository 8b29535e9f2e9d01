"""In 10**5 healthy steps no rank is named."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

WATCH = Path(__file__).parents[3] / "packages" / "zero-core" / "tests" / "test_watch.py"


def test_no_rank_is_named_in_a_hundred_thousand_healthy_steps(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(WATCH.parent)
    watch = runpy.run_path(str(WATCH))
    ranks = watch["_Ranks"](3)
    ranks.run(watch["healthy"](100_000, 3))
    assert ranks.now > 50_000.0
    assert caplog.records == []
