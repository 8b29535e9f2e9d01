"""The marker ``sampled``, in a test session of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_core.testing.sampled_rows import mark_rows_slow

TESTS = """
import pytest

@pytest.mark.sampled(3)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("size", range(5))
def test_grid(stage, size): ...

@pytest.mark.sampled(3)
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_small(stage): ...

@pytest.mark.parametrize("stage", range(4))
def test_whole(stage): ...
"""


class _Gate:
    """A plugin that notes the rows which are not slow."""

    def __init__(self) -> None:
        self.rows: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        mark_rows_slow(items)
        self.rows += [item.name for item in items if item.get_closest_marker("slow") is None]


def test_one_row_in_three_stays_of_a_sampled_grid_with_each_value_and_all_rows_of_others(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_them.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow\n  sampled\n", "utf-8")
    gate = _Gate()
    options = ("-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--collect-only")
    assert pytest.main([*options, str(tmp_path)], plugins=[gate]) == pytest.ExitCode.OK
    grid = [name for name in gate.rows if name.startswith("test_grid")]
    assert len(grid) == 7  # of 20, rounded up
    sizes, stages = zip(*(name[len("test_grid[") : -1].split("-") for name in grid), strict=True)
    assert (set(sizes), set(stages)) == (set("01234"), set("0123"))
    whole = [f"test_whole[{stage}]" for stage in range(4)]
    assert [name for name in gate.rows if name not in grid] == ["test_small[0]", *whole]
