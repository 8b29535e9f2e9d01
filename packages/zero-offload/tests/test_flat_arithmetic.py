"""Layout arithmetic and the gradient ledger, against the plainest definitions."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_offload.flat.geometry import Geometry, plan_runs
from zero_offload.flat.grads import GradLedger
from zero_offload.flat.intervals import Intervals


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    pieces: list[tuple[int, int, int]] = []
    params: list[tuple[int, torch.Tensor]] = []
    at = 0
    for _ in range(draw(st.integers(0, 4))):
        start = at
        for _ in range(draw(st.integers(0, 4))):
            at += draw(st.integers(0, 2))
            size = draw(st.integers(1, 9))
            pieces.append((at, at + size, draw(st.integers(0, 1))))
            at += size
        at += draw(st.integers(0, 3))
        params.append((start, torch.zeros(at - start)))
    return Geometry(at, pieces, params, 2)


def draw_share(data: st.DataObject, numel: int) -> set[int]:
    return set(data.draw(st.sets(st.integers(0, max(numel - 1, 0)), max_size=numel)))


@given(geometries(), st.data())
@settings(deadline=None)
def test_parts_hold_each_element_of_a_piece_once(geometry: Geometry, data: st.DataObject) -> None:
    chosen = draw_share(data, geometry.numel) if geometry.numel else set()
    shares = [Intervals((e, e + 1) for e in chosen)]
    shares.append(shares[0].complement(geometry.numel))
    parts = [geometry.part(share) for share in shares]
    assert sum(part.numel for part, _ in parts) == geometry.numel
    elements = [[e for span in share.spans for e in range(*span)] for share in shares]
    for i, piece in enumerate(geometry.pieces):
        covered: list[int] = []
        for (part, local), own in zip(parts, elements, strict=True):
            for index in local.get(i, ()):
                assert part.pieces[index].group == piece.group
                covered += own[part.pieces[index].start : part.pieces[index].stop]
        assert sorted(covered) == list(range(piece.start, piece.stop))
    for (part, _), own in zip(parts, elements, strict=True):
        for start, tensor in part.shards:
            at = own[start]
            assert tensor.data_ptr() == geometry.view(at, at + tensor.numel()).data_ptr()


@given(geometries(), st.data())
@settings(deadline=None)
def test_padding_goes_with_the_piece_before_it(geometry: Geometry, data: st.DataObject) -> None:
    active = [i for i in range(len(geometry.pieces)) if data.draw(st.booleans())]
    owner: int | None = None
    expected = set()
    starts = {piece.start: i for i, piece in enumerate(geometry.pieces)}
    for element in range(geometry.numel):
        owner = starts.get(element, owner)
        if owner in active:
            expected.add(element)
    spans = geometry.padded_spans(active).spans
    assert {e for span in spans for e in range(*span)} == expected


def test_a_part_has_the_master_dtype_of_the_whole() -> None:
    shards = [(0, torch.zeros(4)), (4, torch.zeros(4, dtype=torch.float64))]
    geometry = Geometry(8, [(0, 4, 0), (4, 8, 0)], shards, 1)
    part, _ = geometry.part(Intervals([(0, 3)]))
    assert part.master_dtype == torch.float64


@given(geometries(), st.data())
@settings(deadline=None)
def test_runs_are_the_longest_that_one_shard_and_key_allow(
    geometry: Geometry, data: st.DataObject
) -> None:
    numbers = range(len(geometry.pieces))
    active = [i for i in numbers if data.draw(st.booleans())]
    keys = {i: geometry.pieces[i].group for i in active}
    runs = plan_runs(geometry, active, keys)
    assert [i for run in runs for i in run.pieces] == active
    for run in runs:
        first, last = geometry.pieces[run.pieces[0]], geometry.pieces[run.pieces[-1]]
        assert (run.start, run.stop) == (first.start, last.stop)
        assert {keys[i] for i in run.pieces} == {run.key}
        assert len({geometry.piece_shards[i] for i in run.pieces}) == 1
        assert sum(geometry.pieces[i].stop - geometry.pieces[i].start for i in run.pieces) == (
            run.stop - run.start
        )
    for left, right in pairwise(runs):
        shards = [geometry.piece_shards[run.pieces[0]] for run in (left, right)]
        assert left.stop < right.start or left.key != right.key or shards[0] != shards[1]


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


def test_neighbours_in_one_buffer_become_one_segment() -> None:
    buffer, ledger = torch.arange(12.0), GradLedger()
    for start, stop in ((8, 12), (0, 4), (4, 8)):
        ledger.add(start, stop, buffer, 0)
    ((start, stop, (view,)),) = ledger.segments(2, 11)
    assert (start, stop) == (2, 11)
    assert view.data_ptr() == buffer[2:].data_ptr()
    assert ledger.gather(2, 11, torch.float32, 1.0).data_ptr() == view.data_ptr()
    assert ledger.gather(2, 11, torch.float32, 2.0).data_ptr() != view.data_ptr()
