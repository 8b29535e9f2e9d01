"""Counts the faults that tests try and that held, and writes docs/faults.md from the counts.

A test is one fault, unless it says by `count_faults` how many it tried. ``--write`` keeps the
counts of earlier runs for the tests that this one leaves out.
"""

from __future__ import annotations

from collections.abc import Callable

import faults_page
import pytest

Report = pytest.TestReport
_TRIED, _WHAT = "faults", "what"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write", action="store_true", help="write docs/faults.md")


@pytest.hookimpl(tryfirst=True)  # before -k takes some away
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        lines = (item.getparent(pytest.Module).obj.__doc__ or item.path.name).splitlines()  # type: ignore[union-attr]
        item.user_properties.append((_WHAT, lines[0].removesuffix(".")))
    config.stash[_COLLECTED] = {_key(item.nodeid) for item in items}


_COLLECTED = pytest.StashKey[set[str]]()


@pytest.fixture
def count_faults(request: pytest.FixtureRequest) -> Callable[[int, int], None]:
    """Return a function that takes how many faults a test tried and how many of them held."""

    def count(tried: int, held: int) -> None:
        request.node.user_properties.append((_TRIED, (tried, held)))

    return count


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    found: faults_page.Counts = {}
    kinds = ("passed", "failed", "error")
    for report in [r for kind in kinds for r in terminalreporter.stats.get(kind, [])]:
        if report.when == "call" or report.failed:
            said = dict(report.user_properties)
            found.setdefault(said[_WHAT], {})[_key(report.nodeid)] = _counts(report)
    for what, tests in found.items():
        tried, held = faults_page.total(tests.values())
        terminalreporter.write_line(f"{held} of {tried} held: {what}")
    tried, held = faults_page.total(map(faults_page.total, map(dict.values, found.values())))
    terminalreporter.write_line(f"{held} of {tried} faults held")
    if config.getoption("--write"):
        faults_page.update(found, config.stash[_COLLECTED])


def _counts(report: Report) -> list[int]:
    pairs = [pair for name, pair in report.user_properties if name == _TRIED] or [(1, 1)]
    tried, held = faults_page.total(pairs)
    return [tried, min(held, tried - 1) if report.failed else held]


def _key(nodeid: str) -> str:
    return nodeid.removeprefix("faults/")
