"""The order of reductions, as a table: what forward used, what backward does, what is reduced."""

import pytest

from zero_core.core.order import BackwardOrder

UNITS = [0, 1, 2, 3]  # the root and three blocks
MISSING = dict.fromkeys(UNITS, 1)


def _forward(order, *units):
    forward = order.begin_forward()
    for unit in units:
        order.use(unit)
    return forward


def _run(order, forward, events):
    """Play ``events``: "e2" enters unit 2, "g2" makes a gradient of it ready, "r2" recomputes it.

    Returns the units that were reduced before the end, and those that were skipped.
    """
    order.begin_backward(MISSING)
    reduced, skipped = [], []
    for event in events.split():
        kind, unit = event[0], int(event[1:])
        if kind == "g":
            order.gradient_ready(unit)
        else:
            skipped += order.enter(unit, forward if kind == "e" else None)
        reduced += order.ready_units()
    return reduced, skipped


@pytest.mark.parametrize(
    ("used", "events", "reduced", "skipped"),
    [
        pytest.param([1, 2, 3], "e3 g3 e2 g2 e1 g1 g0", [3, 2, 1, 0], [], id="all in order"),
        pytest.param([1, 2, 3], "e3 e2 g2 g3 e1 g1", [3, 2, 1], [], id="gradients out of order"),
        pytest.param([1, 2, 3], "g0 e3 g3", [3], [], id="the root waits for the blocks"),
        pytest.param([1, 2, 3], "e3 e2", [3], [], id="a unit that is left is complete"),
        pytest.param([1, 2, 3], "e3 g3 e1", [3, 2], [2], id="a unit that is passed over"),
        pytest.param([1, 3], "e3 g3 e1 g1", [3], [], id="a unit that was not used waits"),
        pytest.param([1, 2, 1], "e1 e2", [], [], id="a unit that is used again is not left"),
        pytest.param([1, 2, 3], "r2 r3 g3 e3 g2 e2", [3, 2], [], id="two units computed again"),
        pytest.param([1, 2, 3], "r1 r2 r3 e3", [], [], id="recomputed, and no gradient yet"),
    ],
)
def test_units_are_reduced_in_reverse_order_when(used, events, reduced, skipped):
    order = BackwardOrder(UNITS)
    forward = _forward(order, *used)
    assert _run(order, forward, events) == (reduced, skipped)
