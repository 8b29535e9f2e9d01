"""Sets of elements and the gradient ledger, compared with simple definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_offload.flat.geometry import Intervals
from zero_offload.flat.grads import GradLedger

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


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12), st.booleans()), max_size=12))
@settings(deadline=None)
def test_ledger_holds_the_latest_offer_of_each_element(offers: list[tuple[int, int, bool]]) -> None:
    numel, shared = 42, torch.zeros(42)
    expected: list[float | None] = [None] * numel
    ledger = GradLedger()
    for value, (start, size, is_shared) in enumerate(offers, start=1):
        stop = start + size
        values = torch.arange(size) / 100 + value
        if is_shared:
            shared[start:stop] = values
            ledger.add(start, stop, shared, 0)
        else:
            ledger.add(start, stop, values, start)
        expected[start:stop] = values.tolist()
    at = 0
    while at < numel:
        stop = at
        while stop < numel and (expected[stop] is None) == (expected[at] is None):
            stop += 1
        if expected[at] is None:
            assert _is_missing(ledger, at, stop)
        else:
            found = ledger.gather(at, stop, torch.float32, 1.0).tolist()
            parts = ledger.segments(at, stop)
            assert [a for a, _, _ in parts] == [at, *[b for _, b, _ in parts[:-1]]]
            assert found == torch.tensor(expected[at:stop]).tolist()
        at = stop


def _is_missing(ledger: GradLedger, start: int, stop: int) -> bool:
    try:
        ledger.segments(start, stop)
    except ValueError:
        return True
    return False
