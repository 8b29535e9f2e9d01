"""Layout arithmetic and the gradient ledger, against the plainest definitions."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_offload.flat.grads import GradLedger


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12), st.booleans()), max_size=12))
@settings(deadline=None)
def test_ledger_holds_the_latest_offer_of_each_element(
    offers: list[tuple[int, int, bool]],
) -> None:
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
