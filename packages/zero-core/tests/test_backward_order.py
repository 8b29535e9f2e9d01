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


def test_a_tail_is_reduced_behind_the_blocks():
    order = BackwardOrder(UNITS, tail=3)
    assert _run(order, _forward(order, 1, 2, 3), "g3 g2 g1 g0") == ([2, 1, 3, 0], [])
    assert order.end_backward() == []


def test_units_that_were_not_ready_are_left_for_the_end():
    order = BackwardOrder(UNITS)
    forward = _forward(order, 1, 2, 3)
    assert _run(order, forward, "e3 g3")[0] == [3]
    assert list(order.skipped_last()) == [2, 1]
    assert list(order.ready_units()) == [2, 1]  # skipped, so that no gradient of them will come
    assert order.end_backward() == [0]
    assert order.end_backward() == [3, 2, 1, 0]  # of the next backward


def test_a_gradient_is_late_when_its_unit_was_complete():
    order = BackwardOrder(UNITS)
    forward = _forward(order, 1, 2, 3)
    _run(order, forward, "e3 g3")
    assert order.gradient_ready(3) == -1


def test_a_unit_stays_when_an_older_forward_that_lives_used_it():
    order = BackwardOrder(UNITS)
    older = _forward(order, 1, 2, 3)
    newer = _forward(order, 1, 2, 3)
    assert _run(order, newer, "e3 e2") == ([], [])
    assert list(order.enter(3, older)) == []
    assert list(order.enter(2, older)) == []
    assert list(order.ready_units()) == [3]


def test_a_unit_is_left_when_the_older_forward_is_dead():
    order = BackwardOrder(UNITS)
    older = _forward(order, 1, 2, 3)
    newer = _forward(order, 1, 2, 3)
    del older
    assert _run(order, newer, "e3 e2") == ([3], [])


def test_a_unit_whose_output_needs_no_gradient_is_not_expected():
    order = BackwardOrder(UNITS)
    forward = order.begin_forward()
    order.use(1)
    order.leave(1, needs_grad=False)
    order.use(2)
    assert _run(order, forward, "e2 g2") == ([], [])  # unit 3 was not used: it waits
    assert list(order.skipped_last()) == []


def test_frozen_units_are_not_reduced():
    order = BackwardOrder([0, 2])
    forward = _forward(order, 1, 2, 3)
    assert _run(order, forward, "e3 e2 g2 e1 g0") == ([2, 0], [])


def test_a_forward_that_waits_for_its_backward_survives_the_end_of_a_step():
    order = BackwardOrder(UNITS)
    first = _forward(order, 1, 2, 3)
    _run(order, first, "e3")
    second = _forward(order, 1, 2, 3)
    order.forget()
    assert _run(order, second, "e3 g3 e2 g2 e1 g1 g0")[0] == [3, 2, 1, 0]
