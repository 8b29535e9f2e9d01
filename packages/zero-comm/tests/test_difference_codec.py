"""Lossless differences, for every input and backend: bits, bytes, length, refusals."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from difference_cases import (
    DTYPES,
    MODES,
    REFERENCE,
    all_modes,
    damaged,
    decoded,
    encoded,
    integers_of,
    modes_in,
    pair,
    wrong_of,
    wrong_verdicts,
)
from difference_reference import moved, ordered, reference_difference, reference_values
from difference_strategies import Pair, pairs
from forced_backend import HOST_BACKENDS, forced
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zero_comm import CorruptMessageError
from zero_comm.differences.codec import (
    DifferenceCodec,
    apply_difference,
    encode_difference,
    find_codec,
)
from zero_comm.differences.message import max_message_nbytes, pack_difference, unpack_difference

CPU = torch.device("cpu")
VERSIONS = (7, 8)
SENDER = 5
every_backend = pytest.mark.parametrize(("name", "isa"), HOST_BACKENDS)


@contextmanager
def using(name: str, isa: str) -> Iterator[DifferenceCodec]:
    with forced(name, isa):
        codec = find_codec(CPU)
        assert codec.name == name
        yield codec


def patterns_of(x: Tensor) -> list[int]:
    bits = 8 * x.element_size()
    return [pattern % 2**bits for pattern in integers_of(x).tolist()]


def message_of(old: Tensor, new: Tensor) -> Tensor:
    room = torch.full((max_message_nbytes(old.numel(), old.element_size()),), 9, dtype=torch.uint8)
    return room[: pack_difference(old, new, room, versions=VERSIONS)]


def assert_refused(message: Tensor, old: Tensor, what: str = "") -> None:
    """By name of the sender, with all values as they were."""
    values = old.clone()
    with pytest.raises(CorruptMessageError, match=rf"rank {SENDER} is damaged.*{what}"):
        unpack_difference(message, values, versions=VERSIONS, sender=SENDER)
    assert torch.equal(integers_of(values), integers_of(old))


@every_backend
@settings(max_examples=150)
@given(both=pairs)
def test_any_two_bit_patterns_come_back_and_the_bytes_are_those_of_torch(
    name: str, isa: str, both: Pair
) -> None:
    with using(name, isa) as codec:
        assert wrong_of(*both, codec, CPU) == []


@settings(max_examples=100)
@given(pairs)
def test_bytes_and_values_are_those_of_the_format_note(both: Pair) -> None:
    old, new = both
    bits = 8 * old.element_size()
    expected = reference_difference(patterns_of(old), patterns_of(new), bits)
    assert bytes(encoded(REFERENCE, old, new).tolist()) == expected
    assert reference_values(expected, patterns_of(old), bits) == patterns_of(new)


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_mode_of_the_format_is_written_and_read(
    name: str, isa: str, dtype: torch.dtype
) -> None:
    old, new = all_modes(dtype)
    bits = 8 * dtype.itemsize
    with using(name, isa) as codec:
        difference = encoded(codec, old, new)
        assert modes_in(difference, old.numel()) == MODES[dtype.itemsize]
        assert wrong_of(old, new, codec, CPU) == []
    expected = reference_difference(patterns_of(old), patterns_of(new), bits)
    assert bytes(difference.tolist()) == expected
    assert reference_values(expected, patterns_of(old), bits) == patterns_of(new)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_neighbouring_numbers_differ_by_one_across_zero_too(dtype: torch.dtype) -> None:
    """The independent reference, by the order of the numbers themselves."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    numbers = every[every.isfinite() & (every != 0)].double().sort().values.to(dtype)
    steps = [ordered(p, 16) for p in patterns_of(numbers)]
    gaps = {b - a for a, b in pairwise(steps)}
    assert gaps == {1, 3}  # both zeros lie between the smallest two
    assert moved(0x8000, 1, 16) == 0


@every_backend
@given(both=pairs)
def test_a_difference_is_never_longer_than_two_bytes_a_block_more_than_the_elements(
    name: str, isa: str, both: Pair
) -> None:
    old, new = both
    with forced(name, isa):
        nbytes = encode_difference(old, new).numel()
    assert nbytes <= old.nbytes + 2 * -(-old.numel() // 256)


@every_backend
def test_unchanged_blocks_are_two_bytes_and_random_ones_two_more_than_themselves(
    name: str, isa: str
) -> None:
    old, new = pair(2560, torch.bfloat16, 1.0, 15, 0)
    new = torch.randint(-(2**15), 2**15, (2560,)).to(torch.int16).view(torch.bfloat16)
    with forced(name, isa):
        assert encode_difference(old, old).numel() == 20
        assert encode_difference(old, new).numel() == 20 + old.nbytes


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_damaged_bytes_have_the_verdict_of_torch(name: str, isa: str, dtype: torch.dtype) -> None:
    with using(name, isa) as codec:
        for numel in (0, 1, 300, 2100):
            old, new = pair(numel, dtype, 0.3, 9, numel)
            difference = encoded(REFERENCE, old, new)
            for other in damaged(difference, numel, 40 if numel else 0, numel):
                assert wrong_verdicts(other, old, codec, CPU) == []


@settings(max_examples=60)
@given(pairs, st.data())
def test_bytes_cut_anywhere_are_refused(both: Pair, data: st.DataObject) -> None:
    difference = encoded(REFERENCE, *both)
    if difference.numel():
        cut = data.draw(st.integers(0, difference.numel() - 1))
        is_good, values = decoded(REFERENCE, difference[:cut], both[0])
        assert not is_good
        assert torch.equal(values, integers_of(both[0]))


@every_backend
@given(both=pairs)
def test_messages_bring_any_two_bit_patterns(name: str, isa: str, both: Pair) -> None:
    old, new = both
    with forced(name, isa):
        message, values = message_of(old, new), old.clone()
        unpack_difference(message, values, versions=VERSIONS, sender=SENDER)
    assert message.numel() % 16 == 0
    assert torch.equal(integers_of(values), integers_of(new))


@every_backend
@settings(max_examples=100)
@given(both=pairs, data=st.data())
def test_a_message_with_any_flipped_bit_is_refused_before_a_value_changes(
    name: str, isa: str, both: Pair, data: st.DataObject
) -> None:
    with forced(name, isa):
        message = message_of(*both)
        in_header = st.integers(0, 8 * 48 - 1)
        bit = data.draw(st.one_of(in_header, st.integers(0, 8 * message.numel() - 1)))
        message[bit // 8] ^= 1 << bit % 8
        assert_refused(message, both[0])


@every_backend
@given(both=pairs, data=st.data())
def test_a_truncated_message_is_refused_before_a_value_changes(
    name: str, isa: str, both: Pair, data: st.DataObject
) -> None:
    with forced(name, isa):
        message = message_of(*both)
        cut = data.draw(st.integers(0, message.numel() - 1))
        assert_refused(message[:cut], both[0], f"it has {cut} bytes" if cut < 48 else "")


def test_a_message_of_other_versions_or_elements_is_refused_with_both() -> None:
    old, new = pair(1000, torch.bfloat16, 0.3, 5, 0)
    message = message_of(old, new)
    for versions in ((6, 8), (7, 9)):
        with pytest.raises(CorruptMessageError, match=r"says .* 7, 8\); expected .*\) *\. If"):
            unpack_difference(message, old.clone(), versions=versions, sender=SENDER)
    assert_refused(message, old[:-1], r"1000, 7, 8\); expected .* 999, 7, 8\)")
    assert_refused(message, torch.zeros(1000), "its header says")


def test_bytes_that_are_wrong_in_spite_of_their_checksum_are_refused() -> None:
    old, new = pair(1000, torch.bfloat16, 0.3, 5, 0)
    other = old.clone()
    other[300:] = new[300:]
    message, shorter = message_of(old, new), message_of(old, other)
    joined = message.clone()
    joined[32:48], joined[48 : shorter.numel()] = shorter[32:48], shorter[48:]
    joined[48:50] = message[48:50]  # the checksum is now that of no bytes
    assert_refused(joined, old, "checksum does not match")


@every_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_functions_take_any_shape_and_change_values_in_place(
    name: str, isa: str, dtype: torch.dtype
) -> None:
    old, new = (x.view(6, 50) for x in pair(300, dtype, 0.3, 5, 3))
    with forced(name, isa):
        difference = encode_difference(old.T, new.T)
        values = old.T.contiguous()
        apply_difference(values, difference)
        assert torch.equal(integers_of(values), integers_of(new.T.contiguous()))
        unaligned = torch.cat([difference[:1], difference])[1:]
        values = torch.nn.Parameter(old.T.contiguous(), requires_grad=dtype.is_floating_point)
        apply_difference(values, unaligned)
        assert torch.equal(integers_of(values.detach()), integers_of(new.T.contiguous()))


@every_backend
def test_a_single_element_of_a_strided_tensor_is_taken_too(name: str, isa: str) -> None:
    old, new = torch.zeros(1, 2)[:, 0], torch.ones(1, 2)[:, 0]
    assert old.is_contiguous()
    assert old.stride() == (2,)
    with forced(name, isa):
        apply_difference(old, encode_difference(old, new))
    assert torch.equal(old, new)


def test_tensors_that_do_not_fit_are_refused_with_both_shapes() -> None:
    x = torch.zeros(4)
    for other in (torch.zeros(5), torch.zeros(4, dtype=torch.int32), torch.zeros(2, 2)):
        with pytest.raises(ValueError, match=r"new must be as old, \[4\] of torch.float32 on cpu"):
            encode_difference(x, other)
    for dtype in (torch.float64, torch.uint8):
        with pytest.raises(ValueError, match=f"elements of 2 or 4 bytes, got {dtype}"):
            encode_difference(x.to(dtype), x.to(dtype))
        with pytest.raises(ValueError, match="values must have elements of 2 or 4 bytes"):
            apply_difference(x.to(dtype), torch.zeros(2, dtype=torch.uint8))


def test_differences_that_do_not_fit_are_refused_with_what_was_found() -> None:
    values = torch.zeros(4, 4)
    with pytest.raises(ValueError, match=r"contiguous, got strides \(1, 4\)"):
        apply_difference(values.T, torch.zeros(2, dtype=torch.uint8))
    for difference in (torch.zeros(2), torch.zeros(1, 2, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="difference must be 1-D uint8, got"):
            apply_difference(values, difference)
    with pytest.raises(ValueError, match="difference must be on cpu, got meta"):
        apply_difference(values, torch.zeros(2, dtype=torch.uint8, device="meta"))


@every_backend
def test_a_difference_of_another_tensor_is_refused(name: str, isa: str) -> None:
    old, new = pair(1000, torch.bfloat16, 0.3, 5, 0)
    with forced(name, isa):
        difference = encode_difference(old, new)
        for values in (old[:700].clone(), torch.cat([old, old])):
            with pytest.raises(ValueError, match=f"its {difference.numel()} bytes do not describe"):
                apply_difference(values, difference)
