"""Counts the faults that tests try and those that hold, and prints both at the end.

A test is one fault, unless it says by `count_faults` how many it tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest

Report = pytest.TestReport
_TRIED, _WHAT = "faults", "what"


@pytest.hookimpl(tryfirst=True)  # before -k takes some away
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        lines = (item.getparent(pytest.Module).obj.__doc__ or item.path.name).splitlines()  # type: ignore[union-attr]
        item.user_properties.append((_WHAT, lines[0].removesuffix(".")))


@pytest.fixture
def count_faults(request: pytest.FixtureRequest) -> Callable[[int, int], None]:
    """Return a function that takes how many faults a test tried and how many of them held."""

    def count(tried: int, held: int) -> None:
        request.node.user_properties.append((_TRIED, (tried, held)))

    return count


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found: dict[str, list[list[int]]] = {}
    kinds = ("passed", "failed", "error")
    for report in [r for kind in kinds for r in terminalreporter.stats.get(kind, [])]:
        if report.when == "call" or report.failed:
            found.setdefault(dict(report.user_properties)[_WHAT], []).append(_counts(report))
    for what, pairs in found.items():
        tried, held = _total(pairs)
        terminalreporter.write_line(f"{held} of {tried} held: {what}")
    tried, held = _total(map(_total, found.values()))
    terminalreporter.write_line(f"{held} of {tried} faults held")


def _counts(report: Report) -> list[int]:
    pairs = [pair for name, pair in report.user_properties if name == _TRIED] or [(1, 1)]
    tried, held = _total(pairs)
    return [tried, min(held, tried - 1) if report.failed else held]


def _total(pairs: Iterable[Sequence[int]]) -> list[int]:
    """Return how many faults were tried and how many held, over ``pairs`` of both."""
    return [sum(column) for column in zip((0, 0), *pairs, strict=True)]
