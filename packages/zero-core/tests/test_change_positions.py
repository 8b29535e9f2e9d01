"""Encodings of changed positions: each decodes to the set it was made of, and refuses others."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero_core.sharded.changes.log import Marks
from zero_core.sharded.changes.positions import (
    Form,
    Kind,
    compare,
    decode,
    decode_gaps,
    encode,
    encode_gaps,
    from_low_bits,
    pack_bits,
    to_low_bits,
    unpack_bits,
)


@st.composite
def masks(draw):
    numel = draw(st.integers(1, 3000))
    share = draw(st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.5, 0.97, 1.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return torch.rand(numel, generator=generator) < share


@given(masks(), st.sampled_from([None, 2, 4]))
def test_an_encoding_decodes_to_its_positions(mask, value_bytes):
    positions = mask.nonzero().view(-1)
    assert torch.equal(decode_gaps(encode_gaps(positions)), positions)
    assert torch.equal(unpack_bits(pack_bits(mask), mask.numel()), mask)
    kind, encoded = encode(mask, value_bytes)
    found = torch.zeros_like(mask)
    found[decode(kind, encoded, mask.numel())] = True
    assert torch.equal(found, mask) or (value_bytes and kind is Kind.ALL and found.all())
    if value_bytes:
        assert encoded.numel() + int(found.sum()) * value_bytes <= mask.numel() * value_bytes


@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=200), st.data())
def test_a_comparison_finds_every_differing_bit(bits, data):
    numel = len(bits)
    old = torch.tensor(bits, dtype=torch.int32).to(torch.int16)
    new = old.clone()
    where = sorted(data.draw(st.sets(st.integers(0, numel - 1))))
    flips = [1 << data.draw(st.integers(0, 14)) for _ in where]
    for place, flip in zip(where, flips, strict=True):
        new[place] ^= flip
    shift = data.draw(st.integers(0, min(3, numel - 1)))
    for dtype in (torch.bfloat16, torch.float16):  # NaNs of all kinds among them
        changed, far = compare(old.view(dtype)[shift:], new.view(dtype)[shift:])
        found = changed.nonzero().view(-1).tolist()
        assert found == [place - shift for place in where if place >= shift]
        moved = (old.to(torch.int32) - new.to(torch.int32)).abs()[shift:]
        assert not bool((~far & (moved > 7)).any())


def test_values_that_changed_their_sign_are_far():
    """The largest NaN and the smallest negative number are neighbours as 16-bit integers."""
    ends = torch.tensor([0x7FFF, 0x7FFE, -0x7FFF, -0x8000], dtype=torch.int32).to(torch.int16)
    changed, far = compare(ends, ends.flip(0))
    assert changed.tolist() == far.tolist() == [True, True, True, True]


@given(st.integers(1, 2000), st.lists(masks(), min_size=1, max_size=8), st.randoms())
def test_marks_are_the_union_of_what_was_added(numel, added, random):
    marks, expected = Marks(numel), torch.zeros(numel, dtype=torch.bool)
    for mask in added:
        start = random.randrange(numel)
        part = mask[: numel - start]
        marks.add(start, part)
        expected[start : start + part.numel()] |= part
    for _ in range(2):
        found = torch.zeros_like(expected)
        marks.mark(found)
        assert torch.equal(found, expected)
        assert marks.is_marked == bool(expected.any())
        marks.compact()


@pytest.mark.parametrize(("share", "most"), [(0.01, 0.012), (0.5, 0.125)])
def test_compact_marks_take_a_byte_per_position_or_a_bit_per_element(share, most):
    numel = 1 << 20
    marks = Marks(numel)
    marks.add(0, torch.rand(numel, generator=torch.Generator().manual_seed(0)) < share)
    marks.compact()
    assert marks.nbytes <= numel * most


@pytest.mark.parametrize(
    ("kind", "encoded", "numel"),
    [
        (Kind.ALL, [1], 3),
        (Kind.BITS, [1], 9),
        (Kind.BITS, [0b1000], 3),
        (Kind.GAPS, [3], 3),
        (Kind.GAPS, [0, 255], 3),
    ],
)
def test_an_encoding_of_other_positions_is_refused(kind, encoded, numel):
    with pytest.raises(ValueError, match="encode no positions"):
        decode(kind, torch.tensor(encoded, dtype=torch.uint8), numel)


@given(st.integers(-(2**15), 2**15 - 1), st.integers(-127, 127), st.integers(0, 127))
def test_low_bits_lead_to_the_new_value_from_any_old_one_nearby(new, distance, between):
    def value(ordered):
        bits = ordered ^ 0x7FFF if ordered < 0 else ordered
        return torch.tensor([bits], dtype=torch.int16).view(torch.bfloat16)

    for form, limit in ((Form.LOW4, 7), (Form.LOW8, 127)):
        old = min(max(new + max(-limit, min(limit, distance)), -(2**15)), 2**15 - 1)
        nearer = new + (old - new) * between // 127  # of a receiver on the way
        for start in (old, nearer):
            found = from_low_bits(value(start), to_low_bits(value(new), form), form)
            assert torch.equal(found.view(torch.int16), value(new).view(torch.int16))
