"""Pytest hooks for a ``conftest.py``: sampled rows of long grids, and faster imports."""

from __future__ import annotations

import gc
import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Disable garbage collection during test collection, because imports leave little garbage."""
    gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Enable garbage collection, and exempt all objects created so far."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    """Keep one in ``n`` rows of each test marked ``sampled(n)``, and mark the others ``slow``.

    A row is one set of a test's parameters. Runs before ``-m`` deselects tests. More rows are kept
    if needed to cover every parameter value that several rows share. Rows are ordered by a hash of
    their names, so every process keeps the same ones.
    """
    rows_of: dict[tuple[str, int], list[pytest.Function]] = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is not None and item.get_closest_marker("slow") is None:
            (n,) = marker.args
            rows_of[item.nodeid.partition("[")[0], n].append(item)  # type: ignore[arg-type]
    for (_, n), rows in rows_of.items():
        kept = _choose(rows, -(-len(rows) // n))
        for row in rows:
            if row not in kept:
                row.add_marker("slow")


def _choose(rows: Sequence[pytest.Function], least: int) -> list[pytest.Function]:
    """Return at least ``least`` rows that together have every value shared by several rows."""
    left = sorted(rows, key=lambda row: hashlib.sha256(row.name.encode()).digest())
    counts = Counter(value for row in rows for value in _values(row))
    missing = {value for value, count in counts.items() if count > 1}
    kept: list[pytest.Function] = []
    while missing or len(kept) < least:
        # Of equally good rows, max() returns the first in the order of hashes.
        best = max(left, key=lambda row: len(_values(row) & missing))
        left.remove(best)
        kept.append(best)
        missing -= _values(best)
    return kept


def _values(row: pytest.Function) -> set[tuple[str, str]]:
    return {(name, repr(value)) for name, value in row.callspec.params.items()}
