"""Lossless differences and values for every backend: bits, bytes, lengths, and refusals."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.backends import (
    CPU,
    DEVICE,
    HOSTS,
    TORCH,
    Target,
    every_device,
    every_host,
    every_target,
)
from support.lossless import (
    DIFFERENCES,
    DTYPES,
    SENDER,
    VALUES,
    Lossless,
    Pair,
    damaged,
    decoded,
    integers_of,
    modes_in,
    unpack_checked,
)
from torch import Tensor

from zero_comm import CorruptMessageError, encode_difference, encode_values
from zero_comm.footprint import expected_gradient_nbytes
from zero_comm.lossless.message import Checks, GradientMessages
from zero_comm.lossless.upload import UploadCodec
from zero_comm.quantizer.checksum import checksum_of, checksums

both_formats = pytest.mark.parametrize("fmt", [DIFFERENCES, VALUES], ids=lambda fmt: fmt.name)
both_sizes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def assert_refused(fmt: Lossless, message: Tensor, old: Tensor, what: str = "") -> None:
    """Check that the error names the sender and that no value changes."""
    values = old.clone()
    with pytest.raises(CorruptMessageError, match=rf"rank {SENDER} is damaged.*{what}"):
        fmt.unpack(message, values)
    assert torch.equal(integers_of(values), integers_of(old))


@contextmanager
def no_waiting() -> Iterator[None]:
    """Fail if the host waits for the device. Torch detects this only with CUDA."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@both_formats
@every_target
def test_any_bit_patterns_come_back_and_the_bytes_are_those_of_torch(
    fmt: Lossless, target: Target
) -> None:
    with target.forced():
        assert fmt.find(target.device).name == target.name
        for old, new in fmt.cases(513 if target.is_interpreted else 2049):
            fmt.check(target.device, old, new)
        target.for_all(lambda both: fmt.check(target.device, *both), fmt.pairs)


@both_formats
def test_each_mode_is_used_and_descriptors_are_all_that_is_added(fmt: Lossless) -> None:
    def check(both: Pair) -> None:
        found = fmt.encoded(fmt.reference, *both)
        assert found.numel() <= both[0].nbytes + 2 * -(-both[0].numel() // 256)

    TORCH.for_all(check, fmt.pairs)
    for itemsize, dtype in ((2, torch.bfloat16), (4, torch.float32)):
        old, new = fmt.all_modes(dtype)
        buffer = fmt.encoded(fmt.reference, old, new)
        assert set(modes_in(buffer, old.numel())) == fmt.modes[itemsize]


DIGESTS = {"differences": "c1e832c2c03bb9da", "values": "6695da193a347112"}
"""Start of the SHA-256 of the buffers of fixed integers."""


@both_formats
def test_bytes_are_those_of_earlier_releases(fmt: Lossless) -> None:
    digest, places = hashlib.sha256(), torch.arange(200 * 256)
    block, bits_of = places // 256, {torch.bfloat16: torch.int16, torch.float32: torch.int32}
    for dtype, integers in bits_of.items():
        bits = 8 * dtype.itemsize
        change = (places * 2654435761 >> 11) % 2 ** (block % (bits - 1) + 1)
        gaps = torch.tensor([0, 1, 3, 13, 80])[block % 5]  # between changed elements
        change *= (places * 97 % 256 * gaps < 256) & (block > 3)
        old = torch.full_like(places, 127 << (bits - 9)) * (block > 3)  # the bits of 0.5
        old, new = (x.to(integers).view(dtype) for x in (old, old + change))
        digest.update(bytes(fmt.encoded(fmt.reference, old, new).tolist()))
    assert digest.hexdigest().startswith(DIGESTS[fmt.name])


@both_formats
@every_target
@both_sizes
def test_damaged_bytes_have_the_verdict_of_torch(
    fmt: Lossless, target: Target, dtype: torch.dtype
) -> None:
    verdicts = []
    with target.forced():
        flips = {300: 2, 513: 2} if target.is_interpreted else {1: 40, 300: 40, 2049: 40}
        for numel in (0, *flips):
            old, new = fmt.pair(numel, dtype, 0.3, 9, numel)
            buffer = fmt.encoded(fmt.reference, old, new)
            others = damaged(buffer, numel, flips.get(numel, 0), numel)
            verdicts += [fmt.check_verdict(target.device, other, old) for other in others]
    # Some flipped bits of codes give valid buffers.
    assert len(verdicts) / 4 < verdicts.count(False) < len(verdicts)


@both_formats
@given(st.data())
def test_bytes_cut_anywhere_are_refused(fmt: Lossless, data: st.DataObject) -> None:
    old, new = data.draw(fmt.pairs)
    buffer = fmt.encoded(fmt.reference, old, new)
    if buffer.numel():
        cut = data.draw(st.integers(0, buffer.numel() - 1))
        assert not decoded(fmt.reference, buffer[:cut], old)[0]


@pytest.mark.parametrize(
    ("dtype", "bits"), [(torch.bfloat16, 11.35), (torch.float16, 14.4), (torch.float32, 27.35)]
)
def test_values_of_normal_numbers_take_the_bits_that_the_format_note_says(
    dtype: torch.dtype, bits: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    values = (1e-2 * torch.randn(1 << 18, generator=generator)).to(dtype)
    found = 8 * encode_values(values).numel() / values.numel()
    assert found <= bits
    if dtype != torch.float16:
        expected = 8 * expected_gradient_nbytes(values.numel(), dtype.itemsize) / values.numel()
        assert found == pytest.approx(expected, rel=0.01)


@both_formats
@pytest.mark.parametrize("target", {t.name: t for t in HOSTS}.values(), ids=str)  # one per backend
def test_messages_bring_any_bit_patterns_and_are_refused_once_a_bit_or_a_byte_is_lost(
    fmt: Lossless, target: Target
) -> None:
    def check(data: st.DataObject) -> None:
        old, new = data.draw(fmt.pairs)
        message, values = fmt.message(old, new), old.clone()
        fmt.unpack(message, values)
        assert message.numel() % 16 == 0
        assert torch.equal(integers_of(values), integers_of(new))
        cut = data.draw(st.integers(0, message.numel() - 1))
        assert_refused(fmt, message[:cut], old, f"it has {cut} bytes" if cut < 48 else "")
        in_header = st.integers(0, 8 * 48 - 1)
        bit = data.draw(st.one_of(in_header, st.integers(0, 8 * message.numel() - 1)))
        message[bit // 8] ^= 1 << bit % 8
        assert_refused(fmt, message, old)

    with target.forced():
        old, new = fmt.pair(257, torch.bfloat16, 1.0, 60, 1)  # no mode shortens this pair
        fmt.unpack(fmt.message(old, new), old)
        target.for_all(check, st.data())


@both_formats
def test_a_message_of_other_elements_is_refused_with_both(fmt: Lossless) -> None:
    old, new = fmt.pair(1000, torch.bfloat16, 0.3, 5, 0)
    message = fmt.message(old, new)
    versions = "7, 8" if fmt is DIFFERENCES else "0, 0"
    assert_refused(fmt, message, old[:-1], rf"1000, {versions}\); expected .* 999, {versions}\)")
    assert_refused(fmt, message, torch.zeros(1000), "its header says")


@pytest.mark.parametrize("versions", [(6, 8), (7, 9)])
def test_a_message_of_other_versions_is_refused_with_both(versions: tuple[int, int]) -> None:
    old, new = DIFFERENCES.pair(1000, torch.bfloat16, 0.3, 5, 0)
    message = DIFFERENCES.message(old, new)
    with pytest.raises(CorruptMessageError, match=r"says .* 7, 8\); expected .*\) *\. If"):
        unpack_checked("differences", message, old, versions)


def test_bytes_that_are_not_those_of_their_checksum_are_refused() -> None:
    old, new = DIFFERENCES.pair(1000, torch.bfloat16, 0.3, 5, 0)
    message = DIFFERENCES.message(old, new)
    shorter = DIFFERENCES.message(old, torch.cat([old[:300], new[300:]]))
    joined = message.clone()
    joined[32:48], joined[48 : shorter.numel()] = shorter[32:48], shorter[48:]
    joined[48:50] = message[48:50]  # no longer matches the checksum
    assert_refused(DIFFERENCES, joined, old, "checksum does not match")


def test_short_slices_and_bytes_are_not_coded() -> None:
    serves = GradientMessages(Checks()).serves
    assert serves(torch.bfloat16, 2048)
    assert not serves(torch.bfloat16, 2047)
    assert not serves(torch.uint8, 1 << 20)


@both_formats
@pytest.mark.parametrize(  # the checks do not depend on the backend, so one backend has all dtypes
    ("target", "dtype"), [(t, d) for t in HOSTS for d in (DTYPES if t == TORCH else DTYPES[::3])]
)
def test_functions_take_any_shape_and_address_and_fill_values_in_place(
    fmt: Lossless, target: Target, dtype: torch.dtype
) -> None:
    old, new = (x.view(6, 50) for x in fmt.pair(300, dtype, 0.3, 5, 3))
    with target.forced():
        buffer = fmt.encode_checked(old.T, new.T)
        unaligned = torch.cat([buffer[:1], buffer])[1:]
        for given_buffer in (buffer, unaligned):
            values = torch.nn.Parameter(old.T.contiguous(), requires_grad=dtype.is_floating_point)
            fmt.decode_checked(given_buffer, values)
            assert torch.equal(integers_of(values.detach()), integers_of(new.T.contiguous()))
        lazy = [torch._neg_view(x) for x in (old, new)]
        if dtype.is_floating_point:
            values = lazy[0].resolve_neg()
            fmt.decode_checked(fmt.encode_checked(*lazy), values)
            assert torch.equal(integers_of(values), integers_of(lazy[1].resolve_neg()))
        with pytest.raises(ValueError, match="lazily negated"):
            fmt.decode_checked(buffer, lazy[0])
        one = torch.zeros(1, 2, dtype=dtype)[:, 0]  # contiguous despite its stride of 2
        fmt.decode_checked(fmt.encode_checked(one, torch.ones_like(one)), one)
        assert one.tolist() == [1]


BYTES = torch.zeros(2, dtype=torch.uint8)


def test_tensors_that_do_not_fit_are_refused_with_both_shapes() -> None:
    x = torch.zeros(4)
    for other in (torch.zeros(5), torch.zeros(4, dtype=torch.int32), torch.zeros(2, 2)):
        with pytest.raises(ValueError, match=r"new must be as old, \[4\] of torch.float32 on cpu"):
            encode_difference(x, other)


@both_formats
@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8])
def test_elements_of_other_sizes_are_refused(fmt: Lossless, dtype: torch.dtype) -> None:
    x = torch.zeros(4, dtype=dtype)
    with pytest.raises(ValueError, match=f"elements of 2 or 4 bytes, got {dtype}"):
        fmt.encode_checked(x, x)
    with pytest.raises(ValueError, match=f"values must have elements of 2 or 4 bytes, got {dtype}"):
        fmt.decode_checked(BYTES, x)


@both_formats
def test_buffers_that_do_not_fit_are_refused_with_what_was_found(fmt: Lossless) -> None:
    values = torch.zeros(4, 4)
    with pytest.raises(ValueError, match=r"contiguous, got strides \(1, 4\)"):
        fmt.decode_checked(BYTES, values.T)
    for buffer in (torch.zeros(2), BYTES.view(1, 2)):
        with pytest.raises(ValueError, match=r"must be 1-D uint8.*, got"):
            fmt.decode_checked(buffer, values)
    with pytest.raises(ValueError, match=r"on cpu, got .*meta"):
        fmt.decode_checked(BYTES.to("meta"), values)


@both_formats
@every_host
def test_a_buffer_of_another_tensor_is_refused(fmt: Lossless, target: Target) -> None:
    old, new = fmt.pair(1000, torch.bfloat16, 0.3, 5, 0)
    with target.forced():
        buffer = fmt.encode_checked(old, new)
        for values in (old[:700].clone(), torch.cat([old, old])):
            with pytest.raises(ValueError, match=f"its {buffer.numel()} bytes do not "):
                fmt.decode_checked(buffer, values)


@every_host
@both_sizes
@pytest.mark.parametrize("numel", [0, 1, 600])
def test_uploaded_values_are_the_new_ones_bit_for_bit(
    target: Target, dtype: torch.dtype, numel: int
) -> None:
    codec = UploadCodec()
    old, new = DIFFERENCES.pair(numel, dtype, 0.3, 5, numel)
    room = torch.empty(codec.max_nbytes(numel, dtype.itemsize), dtype=torch.uint8)
    with target.forced():
        codec.decode(room[: codec.encode(old, new, room, num_threads=2)], old)
    assert torch.equal(integers_of(old), integers_of(new))
    assert [codec.max_nbytes(numel, itemsize) for itemsize in (1, 8)] == [0, 0]


@every_host
def test_checksums_are_the_same_at_any_address_and_by_any_backend(target: Target) -> None:
    values = torch.arange(52_000, dtype=torch.int64).mul_(-7046029254386353131).view(torch.int16)
    for numel in (0, 1, 3, 4, 4095, 4096, 4097, 70_001, 208_000):
        moved = torch.empty(numel + 3, dtype=torch.int16)[3:].copy_(values[:numel])
        with TORCH.forced():
            expected = int(checksum_of(values[:numel]))
        with target.forced():
            assert {int(checksum_of(x)) for x in (values[:numel], moved)} == {expected}
    rows = values[: 3 * 8200].view(torch.uint8).view(3, -1)[:, :16_384]  # rows with gaps
    with TORCH.forced():
        sums = checksums(rows)
    with target.forced():
        assert torch.equal(checksums(rows), sums)


@every_host
@both_sizes
def test_checksums_see_what_was_edited(target: Target, dtype: torch.dtype) -> None:
    # The sign of every fourth 16-bit weight is the highest bit of a 64-bit word.
    weight = torch.randn(256, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    edits = [weight.clone() for _ in range(6)]
    edits[1][:, 3].neg_()
    edits[2][:, 3] = 0.0
    edits[3][:2] = weight[:2].flip(0)
    edits[4][:, 3] = weight[:, 3].roll(1)
    integers_of(edits[5])[200, 21] ^= 1
    with target.forced():
        assert len({int(UploadCodec().checksum(x.flatten())) for x in edits}) == 6


@both_formats
@every_device
@both_sizes
def test_millions_of_elements_on_a_device_give_the_bytes_of_the_host(
    fmt: Lossless, target: Target, dtype: torch.dtype
) -> None:
    with target.forced():
        for share, octaves in ((0.02, 2), (0.5, 6), (1.0, 15)):
            fmt.check(target.device, *fmt.pair((1 << 21) + 77, dtype, share, octaves, 5))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_encoding_and_uploads_wait_for_nothing_on_the_device() -> None:
    old, new = DIFFERENCES.pair(1 << 16, torch.bfloat16, 0.3, 5, 0)
    there = old.to(DEVICE), new.to(DEVICE)
    codec, upload = DIFFERENCES.find(there[0].device), UploadCodec()
    out = torch.empty(upload.max_nbytes(old.numel(), 2), dtype=torch.uint8, device=DEVICE)
    room = torch.empty_like(out, device=CPU)
    difference = room[: upload.encode(old, new, room, num_threads=1)].to(DEVICE)
    ours, tried = old.to(DEVICE), old.to(DEVICE)
    first = codec.encode(*there, out=out)  # this and the next two calls compile kernels
    upload.decode(difference, tried)
    before = upload.checksum(ours)
    with no_waiting():
        again = codec.encode(*there, out=out)
        upload.checksum(ours)
        upload.decode(difference, ours)
    assert int(first) == int(again) < out.numel()
    assert int(before) == int(upload.checksum(old))
    assert torch.equal(integers_of(ours.cpu()), integers_of(new))
