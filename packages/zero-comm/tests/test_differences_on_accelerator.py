"""Codecs of lossless differences on an accelerator, held against plain torch on the host."""

import pytest
import torch
from difference_cases import (
    REFERENCE,
    cases,
    damaged,
    encoded,
    integers_of,
    pair,
    wrong_of,
    wrong_verdicts,
)

from zero_comm.differences.codec import DifferenceCodec, find_codec
from zero_comm.differences.difference_format import max_difference_nbytes
from zero_comm.differences.message import max_message_nbytes, pack_difference, unpack_difference
from zero_comm.differences.upload import UploadCodec

if not torch.accelerator.is_available():
    pytest.skip("torch finds no accelerator", allow_module_level=True)

DEVICE = torch.accelerator.current_accelerator()
assert DEVICE is not None


def codecs() -> list[DifferenceCodec]:
    """The one that serves the device, and plain torch there."""
    found = [find_codec(DEVICE), REFERENCE]
    return found if found[0].name != "torch" else found[:1]


every_codec = pytest.mark.parametrize("codec", codecs(), ids=lambda codec: codec.name)


@every_codec
def test_bytes_and_values_on_the_device_are_those_of_the_host(codec: DifferenceCodec) -> None:
    assert [line for both in cases() for line in wrong_of(*both, codec, DEVICE)] == []


@every_codec
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_millions_of_elements_give_the_bytes_of_the_host(
    codec: DifferenceCodec, dtype: torch.dtype
) -> None:
    for share, octaves in ((0.02, 2), (0.5, 6), (1.0, 15)):
        old, new = pair((1 << 21) + 77, dtype, share, octaves, 5)
        assert wrong_of(old, new, codec, DEVICE) == []


@every_codec
def test_damaged_bytes_have_the_verdict_of_the_host(codec: DifferenceCodec) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        old, new = pair(2100, dtype, 0.2, 7, 3)
        for other in damaged(encoded(REFERENCE, old, new), old.numel(), 200, 3):
            assert wrong_verdicts(other, old, codec, DEVICE) == []


def test_messages_travel_between_device_and_host() -> None:
    old, new = pair(5000, torch.bfloat16, 0.3, 5, 0)
    room = torch.empty(max_message_nbytes(5000, 2), dtype=torch.uint8, device=DEVICE)
    nbytes = pack_difference(old.to(DEVICE), new.to(DEVICE), room, versions=(1, 2))
    unpack_difference(room[:nbytes].cpu(), old, versions=(1, 2), sender=0)
    assert torch.equal(integers_of(old), integers_of(new))


def test_encoding_waits_for_nothing_on_the_device() -> None:
    """The length stays there. CUDA alone can say that it was waited for."""
    if find_codec(DEVICE).name != "triton" or DEVICE.type != "cuda":
        pytest.skip("only Triton's codec on CUDA's devices doesn't wait, and is asked")
    old, new = (x.to(DEVICE) for x in pair(1 << 16, torch.bfloat16, 0.3, 5, 0))
    nbytes = max_difference_nbytes(old.numel(), 2)
    out = torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
    codec = find_codec(DEVICE)
    first = codec.encode(old, new, out)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = codec.encode(old, new, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(first) == int(again) < nbytes


def test_uploads_arrive_on_the_device_without_waiting_for_it() -> None:
    """CUDA alone can say that it was waited for."""
    if find_codec(DEVICE).name != "triton" or DEVICE.type != "cuda":
        pytest.skip("only Triton's codec on CUDA's devices doesn't wait, and is asked")
    codec = UploadCodec()
    old, new = pair(1 << 16, torch.bfloat16, 0.3, 5, 0)
    room = torch.empty(codec.max_nbytes(old.numel(), 2), dtype=torch.uint8)
    difference = room[: codec.encode(old, new, room, num_threads=1)].to(DEVICE)
    ours, tried = old.to(DEVICE), old.to(DEVICE)
    codec.decode(difference, tried)  # compiles
    first = codec.checksum(ours)
    torch.cuda.set_sync_debug_mode("error")
    try:
        before = codec.checksum(ours)
        codec.decode(difference, ours)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(first) == int(before) == int(codec.checksum(old))
    assert torch.equal(integers_of(ours.cpu()), integers_of(new))
