"""Lossless differences from host memory to a device: here both are the host."""

import pytest
import torch
from difference_cases import integers_of, pair
from forced_backend import HOST_BACKENDS, forced

from zero_comm.differences.upload import UploadCodec

every_backend = pytest.mark.parametrize("backend", HOST_BACKENDS, ids="-".join)


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("numel", [0, 1, 255, 3001])
def test_decoded_values_are_the_new_ones_bit_for_bit(
    backend: tuple[str, str], dtype: torch.dtype, numel: int
) -> None:
    codec = UploadCodec()
    old, new = pair(numel, dtype, 0.3, 5, numel)
    room = torch.empty(codec.max_nbytes(numel, dtype.itemsize), dtype=torch.uint8)
    values = old.clone()
    with forced(*backend):
        nbytes = codec.encode(old, new, room, num_threads=2)
        codec.decode(room[:nbytes], values)
    assert torch.equal(integers_of(values), integers_of(new))


@pytest.mark.parametrize("itemsize", [1, 8])
def test_elements_that_no_difference_serves_have_no_bytes(itemsize: int) -> None:
    assert UploadCodec().max_nbytes(1000, itemsize) == 0


@every_backend
@pytest.mark.parametrize("numel", [0, 1, 3, 4, 4095, 4096, 70_001])
def test_checksums_are_the_same_at_any_address_and_by_any_backend(
    backend: tuple[str, str], numel: int
) -> None:
    codec = UploadCodec()
    values = torch.arange(numel).to(torch.int16)
    with forced(*backend):
        moved = torch.empty(numel + 3, dtype=torch.int16)[3:]
        moved.copy_(values)
        found = {int(codec.checksum(x)) for x in (values, moved)}
    with forced("torch"):
        assert found == {int(codec.checksum(values))}


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_checksum_sees_edits_of_a_column_of_weights(
    backend: tuple[str, str], dtype: torch.dtype
) -> None:
    """The signs of every fourth 16-bit weight are the highest bits of words."""
    weight = torch.randn(256, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    edits = [weight.clone() for _ in range(5)]
    edits[1][:, 3].neg_()
    edits[2][:, 3] = 0.0
    edits[3][:2] = weight[:2].flip(0)
    edits[4][:, 3] = weight[:, 3].roll(1)
    with forced(*backend):
        assert len({int(UploadCodec().checksum(x.flatten())) for x in edits}) == 5


@every_backend
def test_checksum_sees_a_changed_and_an_exchanged_value(backend: tuple[str, str]) -> None:
    codec = UploadCodec()
    values = torch.arange(5000).to(torch.int16)
    changed, exchanged = values.clone(), values.clone()
    changed[4321] ^= 1
    exchanged[:8] = values[8:16]
    exchanged[8:16] = values[:8]
    with forced(*backend):
        assert len({int(codec.checksum(x)) for x in (values, changed, exchanged)}) == 3
