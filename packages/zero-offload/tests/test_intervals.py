"""Sets of elements as intervals, against Python's own sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_offload.flat.intervals import Intervals

NUMEL = 24
ENDS = st.tuples(st.integers(0, NUMEL), st.integers(0, NUMEL))
PAIRS = st.lists(ENDS.map(lambda ends: (min(ends), max(ends))), max_size=6)


def elements(intervals: Intervals) -> list[int]:
    return [e for span in intervals.spans for e in range(*span)]


def as_set(pairs: list[tuple[int, int]]) -> set[int]:
    return {e for pair in pairs for e in range(*pair)}


@given(PAIRS)
def test_spans_are_sorted_and_never_touch(pairs: list[tuple[int, int]]) -> None:
    found = Intervals(pairs)
    assert elements(found) == sorted(as_set(pairs))
    assert found.numel == len(as_set(pairs))
    assert bool(found) == bool(as_set(pairs))
    for (_, stop), (start, _) in zip(found.spans, found.spans[1:], strict=False):
        assert stop < start
    assert found == Intervals(found.spans)
    assert hash(found) == hash(Intervals(found.spans))


@given(PAIRS, PAIRS)
def test_operations_are_those_of_sets(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    left, right = Intervals(a), Intervals(b)
    assert elements(left.union(right)) == sorted(as_set(a) | as_set(b))
    assert elements(left.intersection(right)) == sorted(as_set(a) & as_set(b))
    assert elements(left.difference(right)) == sorted(as_set(a) - as_set(b))
    assert elements(left.complement(NUMEL)) == sorted(set(range(NUMEL)) - as_set(a))
    assert (left == right) == (as_set(a) == as_set(b))


@pytest.mark.parametrize("pair", [(-1, 2), (3, 2)])
def test_pairs_that_are_no_interval_are_refused(pair: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="no interval"):
        Intervals([(0, 1), pair])
