"""The page of TRL's trainers is what the program writes from the results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import report
import trl_grid


def test_page_is_made_from_the_results() -> None:
    found = json.loads(trl_grid.RESULTS.read_text(encoding="utf-8"))
    page = report.page(trl_grid.HEAD, trl_grid.ALL, trl_grid.PLANNED, found)
    assert page == trl_grid.PAGE.read_text(encoding="utf-8")
