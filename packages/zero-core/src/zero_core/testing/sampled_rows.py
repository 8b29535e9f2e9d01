"""Long grids of tests, of which the gate runs some rows: the marker ``sampled``."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def mark_rows_slow(items: Iterable[pytest.Item]) -> None:
    """Keep one row in ``n`` of each test marked ``sampled(n)``, and mark the others ``slow``.

    Which ones are kept depends on a digest of their names alone: every process and every run
    keeps the same, and they are spread over all parameters of the grid. At least one is kept.
    """
    rows_of = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is not None and item.get_closest_marker("slow") is None:
            rows_of[item.nodeid.partition("[")[0], *marker.args].append(item)
    for (_, n), rows in rows_of.items():
        rows.sort(key=lambda row: hashlib.sha256(row.name.encode()).digest())
        for row in rows[-(-len(rows) // n) :]:
            row.add_marker("slow")
