"""Losslessly coded values, for every input and backend: bits, bytes, length, refusals."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from difference_cases import DTYPES, damaged, integers_of, modes_in
from forced_backend import HOST_BACKENDS, forced
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from value_cases import (
    MODES,
    REFERENCE,
    all_value_modes,
    any_values,
    decoded_values,
    encoded_values,
    value_cases,
    values_of,
    wrong_value_verdicts,
    wrong_values,
)
from value_reference import reference_elements, reference_values_buffer

from zero_comm import CorruptMessageError, decode_values, encode_values
from zero_comm.values.codec import ValueCodec, find_value_codec
from zero_comm.values.message import GradientMessages, expected_message_nbytes

CPU = torch.device("cpu")
SENDER = 5
MESSAGES = GradientMessages()
every_backend = pytest.mark.parametrize(("name", "isa"), HOST_BACKENDS)


@contextmanager
def using(name: str, isa: str) -> Iterator[ValueCodec]:
    with forced(name, isa):
        codec = find_value_codec(CPU)
        assert codec.name == name
        yield codec


def patterns_of(x: Tensor) -> list[int]:
    bits = 8 * x.element_size()
    return [pattern % 2**bits for pattern in integers_of(x).tolist()]


def message_of(values: Tensor) -> Tensor:
    room = torch.full((MESSAGES.max_nbytes(values.dtype, values.numel()),), 9, dtype=torch.uint8)
    return room[: MESSAGES.pack(values, room)]


def assert_refused(message: Tensor, like: Tensor, what: str = "") -> None:
    with pytest.raises(CorruptMessageError, match=rf"rank {SENDER} is damaged.*{what}"):
        MESSAGES.unpack(message, like.clone(), sender=SENDER)


@every_backend
@settings(max_examples=150)
@given(values=any_values())
def test_any_bit_patterns_come_back_and_the_bytes_are_those_of_torch(
    name: str, isa: str, values: Tensor
) -> None:
    with using(name, isa) as codec:
        assert wrong_values(values, codec, CPU) == []


@every_backend
def test_usual_and_unusual_tensors_have_the_bytes_of_torch(name: str, isa: str) -> None:
    with using(name, isa) as codec:
        assert [line for x in value_cases() for line in wrong_values(x, codec, CPU)] == []


@settings(max_examples=100)
@given(any_values())
def test_bytes_and_values_are_those_of_the_format_note(values: Tensor) -> None:
    bits = 8 * values.element_size()
    expected = reference_values_buffer(patterns_of(values), bits)
    assert bytes(encoded_values(REFERENCE, values).tolist()) == expected
    assert reference_elements(expected, values.numel(), bits) == patterns_of(values)


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_mode_of_the_format_is_written_and_read(
    name: str, isa: str, dtype: torch.dtype
) -> None:
    values = all_value_modes(dtype)
    bits = 8 * dtype.itemsize
    with using(name, isa) as codec:
        buffer = encoded_values(codec, values)
        assert modes_in(buffer, values.numel()) == MODES
        assert wrong_values(values, codec, CPU) == []
    expected = reference_values_buffer(patterns_of(values), bits)
    assert bytes(buffer.tolist()) == expected
    assert reference_elements(expected, values.numel(), bits) == patterns_of(values)


@every_backend
@given(values=any_values())
def test_values_are_never_longer_than_two_bytes_a_block_more_than_the_elements(
    name: str, isa: str, values: Tensor
) -> None:
    with forced(name, isa):
        nbytes = encode_values(values).numel()
    assert nbytes <= values.nbytes + 2 * -(-values.numel() // 256)


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.bfloat16, 11.35), (torch.float16, 14.4), (torch.float32, 27.35)]
)
def test_normal_numbers_take_the_bits_that_the_format_note_says(
    dtype: torch.dtype, bits: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    values = (1e-2 * torch.randn(1 << 18, generator=generator)).to(dtype)
    found = 8 * encode_values(values).numel() / values.numel()
    assert found <= bits
    if dtype != torch.float16:
        expected = 8 * expected_message_nbytes(values.numel(), dtype.itemsize) / values.numel()
        assert found == pytest.approx(expected, rel=0.01)


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_damaged_bytes_have_the_verdict_of_torch(name: str, isa: str, dtype: torch.dtype) -> None:
    with using(name, isa) as codec:
        for numel in (0, 1, 300, 2100):
            values = values_of(numel, dtype, 4, 0.02, numel)
            buffer = encoded_values(REFERENCE, values)
            for other in damaged(buffer, numel, 40 if numel else 0, numel):
                assert wrong_value_verdicts(other, values, codec, CPU) == []


@settings(max_examples=60)
@given(any_values(), st.data())
def test_bytes_cut_anywhere_are_refused(values: Tensor, data: st.DataObject) -> None:
    buffer = encoded_values(REFERENCE, values)
    if buffer.numel():
        cut = data.draw(st.integers(0, buffer.numel() - 1))
        assert not decoded_values(REFERENCE, buffer[:cut], values)[0]


@every_backend
@given(values=any_values())
def test_messages_bring_any_bit_patterns(name: str, isa: str, values: Tensor) -> None:
    with forced(name, isa):
        message, found = message_of(values), torch.zeros_like(values)
        MESSAGES.unpack(message, found, sender=SENDER)
    assert message.numel() % 16 == 0
    assert torch.equal(integers_of(found), integers_of(values))


@every_backend
@settings(max_examples=100)
@given(values=any_values(), data=st.data())
def test_a_message_with_any_flipped_bit_is_refused(
    name: str, isa: str, values: Tensor, data: st.DataObject
) -> None:
    with forced(name, isa):
        message = message_of(values)
        in_header = st.integers(0, 8 * 48 - 1)
        bit = data.draw(st.one_of(in_header, st.integers(0, 8 * message.numel() - 1)))
        message[bit // 8] ^= 1 << bit % 8
        assert_refused(message, values)


@given(values=any_values(), data=st.data())
def test_a_truncated_message_is_refused(values: Tensor, data: st.DataObject) -> None:
    message = message_of(values)
    cut = data.draw(st.integers(0, message.numel() - 1))
    assert_refused(message[:cut], values, f"it has {cut} bytes" if cut < 48 else "")


def test_a_message_of_other_elements_is_refused_with_both() -> None:
    values = values_of(1000, torch.bfloat16, 4, 0.0, 0)
    message = message_of(values)
    assert_refused(message, values[:-1], r"1000, 0, 0\); expected .* 999, 0, 0\)")
    assert_refused(message, torch.zeros(1000), "its header says")


def test_short_slices_and_bytes_are_not_coded() -> None:
    assert MESSAGES.serves(torch.bfloat16, 2048)
    assert not MESSAGES.serves(torch.bfloat16, 2047)
    assert not MESSAGES.serves(torch.uint8, 1 << 20)


@every_backend
@pytest.mark.parametrize("dtype", DTYPES)
def test_functions_take_any_shape_and_fill_values_in_place(
    name: str, isa: str, dtype: torch.dtype
) -> None:
    values = values_of(600, dtype, 3, 0.0, 3).view(6, 100)
    with forced(name, isa):
        buffer = encode_values(values.T)
        unaligned = torch.cat([buffer[:1], buffer])[1:]
        for given_buffer in (buffer, unaligned):
            found = torch.zeros(100, 6, dtype=dtype)
            decode_values(given_buffer, found)
            assert torch.equal(integers_of(found), integers_of(values.T.contiguous()))


def test_arguments_that_do_not_fit_are_refused_with_what_was_found() -> None:
    values = torch.zeros(4, 4)
    with pytest.raises(ValueError, match=r"elements of 2 or 4 bytes, got .*float64"):
        encode_values(values.double())
    with pytest.raises(ValueError, match=r"elements of 2 or 4 bytes, got .*uint8"):
        decode_values(torch.zeros(2, dtype=torch.uint8), values.to(torch.uint8))
    with pytest.raises(ValueError, match=r"contiguous, got strides \(1, 4\)"):
        decode_values(torch.zeros(2, dtype=torch.uint8), values.T)
    for buffer in (torch.zeros(2), torch.zeros(1, 2, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="buffer must be 1-D uint8 on cpu, got"):
            decode_values(buffer, values)


@every_backend
def test_a_buffer_of_another_tensor_is_refused(name: str, isa: str) -> None:
    values = values_of(1000, torch.bfloat16, 4, 0.0, 0)
    with forced(name, isa):
        buffer = encode_values(values)
        for other in (values[:700].clone(), torch.cat([values, values])):
            with pytest.raises(ValueError, match=f"its {buffer.numel()} bytes do not code"):
                decode_values(buffer, other)
