import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero_core.layout.arithmetic import ALIGNMENT, Layout, ParamSpec

sizes = st.lists(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), max_size=3),
            st.sampled_from([torch.float32, torch.bfloat16]),
            st.booleans(),
        ),
        max_size=5,
    ),
    min_size=1,
    max_size=4,
)


def make(units, world_size):
    specs, members = [], []
    for index, unit in enumerate(units):
        numbers = []
        for shape, dtype, is_trainable in unit:
            numbers.append(len(specs))
            specs.append(ParamSpec(f"p{len(specs)}", tuple(shape), dtype, is_trainable))
        members.append((f"u{index}" if index else "", numbers))
    return Layout.build(specs, members, world_size)


@given(sizes, st.integers(1, 7))
def test_each_parameter_has_one_aligned_slot_of_its_size(units, world_size):
    layout = make(units, world_size)
    seen = {}
    for segment in layout.segments:
        end = 0
        for slot in segment.slots:
            assert slot.start >= end
            assert slot.start % ALIGNMENT == 0
            assert slot.stop - slot.start == layout.params[slot.param].numel
            assert layout.params[slot.param].dtype == segment.dtype
            assert layout.params[slot.param].is_trainable == segment.is_trainable
            assert slot.param not in seen
            seen[slot.param] = segment.index
            end = slot.stop
        assert end <= segment.padded_numel
        assert segment.shard_numel % ALIGNMENT == 0
        stretches = [(s.start, s.stop) for s in segment.slots if s.stop > s.start]
        starts, stops = zip((0, 0), *sorted(stretches + list(segment.gaps())), strict=True)
        assert [*starts[1:], segment.padded_numel] == [*stops], "slots and gaps tile it"
    assert len(seen) == len(layout.params)


@given(sizes, st.integers(1, 7), st.booleans())
def test_pieces_cover_every_trainable_element_once(units, world_size, is_sharded):
    layout = make(units, world_size)
    counts = {p: [0] * spec.numel for p, spec in enumerate(layout.params) if spec.is_trainable}
    for rank in range(world_size):
        end = 0
        for piece in layout.pieces(rank, is_sharded=is_sharded):
            assert end <= piece.start < piece.stop <= layout.local_numel(is_sharded=is_sharded)
            end = piece.stop
            for i in range(piece.stop - piece.start):
                counts[piece.param][piece.offset + i] += 1
    times = 1 if is_sharded else world_size
    assert all(count == times for row in counts.values() for count in row)


def test_a_parameter_in_two_units_is_refused():
    spec = ParamSpec("p", (3,), torch.float32, True)
    with pytest.raises(ValueError, match="exactly one unit"):
        Layout.build([spec], [("", [0]), ("a", [0])], 2)
