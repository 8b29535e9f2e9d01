"""Pairs of old and new tensors, and a codec of their differences held against plain torch."""

from collections.abc import Iterator

import torch
from torch import Tensor

from zero_comm.differences.codec import DifferenceCodec
from zero_comm.differences.difference_format import (
    BLOCK_NUMEL,
    descriptors_nbytes,
    max_difference_nbytes,
)
from zero_comm.differences.torch_codec import TorchCodec

DTYPES = (torch.bfloat16, torch.float16, torch.int16, torch.float32, torch.int32)
MODES = {2: {0, 1, 2, 3, 4, 6, 7, 8, 10, 11, 12}, 4: set(range(14))}
GAP = 16  # bytes, or elements, that belong to someone else
REFERENCE = TorchCodec()


def integers_of(x: Tensor) -> Tensor:
    """The bits of elements, which compare NaN and signed zeros too."""
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def pair(
    numel: int, dtype: torch.dtype, share: float, octaves: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Any old bits; a ``share`` of them moved by up to ``octaves`` bits, evenly in logarithms."""
    generator = torch.Generator().manual_seed(seed)
    bits = 8 * dtype.itemsize
    integers = torch.int16 if bits == 16 else torch.int32
    old = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (numel,), generator=generator)
    size = torch.exp2(torch.rand(numel, generator=generator, dtype=torch.float64) * octaves)
    size *= (torch.rand(numel, generator=generator) < share).double()
    sign = torch.randint(0, 2, (numel,), generator=generator) * 2 - 1
    new = old + sign * size.round().long()
    return old.to(integers).view(dtype), new.to(integers).view(dtype)


def all_modes(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A few blocks of each kind: between them, every mode of the format."""
    made = [
        pair(2 * BLOCK_NUMEL, dtype, share, octaves, seed)
        for seed, share in enumerate((0.0, 0.01, 0.1, 0.5, 1.0))
        for octaves in (0.5, 1, 2, 4, 7, 10, 13, 15, 18, 24, 31)
        if octaves < 8 * dtype.itemsize
    ]
    old, new = zip(*made, strict=True)
    return torch.cat(old), torch.cat(new)


def cases() -> Iterator[tuple[Tensor, Tensor]]:
    """All modes in each size of element, and lengths around whole blocks and tiles."""
    yield all_modes(torch.bfloat16)
    yield all_modes(torch.float32)
    for index, numel in enumerate((0, 1, 2, 3, 255, 256, 257, 1000, 2047, 2049)):
        share, octaves = (0.02, 0.3, 1.0)[index % 3], (1, 5, 9, 14)[index % 4]
        yield pair(numel, DTYPES[index % len(DTYPES)], share, octaves, index)
        yield pair(numel, DTYPES[(index + 3) % len(DTYPES)], 1.0, 15, index)


def modes_in(difference: Tensor, numel: int) -> set[int]:
    """The modes of a buffer's blocks."""
    descriptors = difference[: descriptors_nbytes(numel)].cpu().view(torch.int16)
    return {x >> 11 for x in descriptors.tolist()}


def encoded(codec: DifferenceCodec, old: Tensor, new: Tensor) -> Tensor:
    """The bytes of the differences, made between bytes that must stay as they are."""
    nbytes = max_difference_nbytes(old.numel(), old.element_size())
    out = torch.full((GAP + nbytes + GAP,), 7, dtype=torch.uint8, device=old.device)
    length = codec.encode(old, new, out[GAP : GAP + nbytes])
    assert (length.dtype, length.dim(), length.device) == (torch.int64, 0, old.device)
    assert int(length) <= nbytes
    assert (out[:GAP] == 7).all()
    assert (out[GAP + nbytes :] == 7).all()
    return out[GAP : GAP + int(length)]


def decoded(
    codec: DifferenceCodec, difference: Tensor, old: Tensor, around: int = 7
) -> tuple[bool, Tensor]:
    """Whether the bytes are good, and the values: both between others, which must not matter."""
    numel, nbytes = old.numel(), difference.numel()
    buffer = torch.full((GAP + nbytes + GAP,), around, dtype=torch.uint8, device=old.device)
    buffer[GAP : GAP + nbytes] = difference
    integers = integers_of(old)
    values = torch.full((GAP + numel + GAP,), 77, dtype=integers.dtype, device=old.device)
    values[GAP : GAP + numel] = integers
    own = values[GAP : GAP + numel]
    is_good = bool(codec.decode(buffer[GAP : GAP + nbytes], own.view(old.dtype)))
    assert (values[:GAP] == 77).all()
    assert (values[GAP + numel :] == 77).all()
    return is_good, own


def wrong_of(old: Tensor, new: Tensor, codec: DifferenceCodec, device: torch.device) -> list[str]:
    """What ``codec`` does otherwise than plain torch on a CPU does: one line each."""
    what = f"{old.numel()} of {old.dtype}"
    expected = encoded(REFERENCE, old, new)
    found = encoded(codec, old.to(device), new.to(device))
    wrong = [] if torch.equal(found.cpu(), expected) else [f"{what}: bytes"]
    is_good, values = decoded(codec, expected.to(device), old.to(device))
    if not is_good or not torch.equal(values.cpu(), integers_of(new)):
        wrong.append(f"{what}: values")
    return wrong


def damaged(difference: Tensor, numel: int, count: int, seed: int) -> Iterator[Tensor]:
    """Buffers with ``count`` flipped bits of descriptors and of codes, and of other lengths."""
    generator = torch.Generator().manual_seed(seed)
    start = descriptors_nbytes(numel)

    def drawn(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    for number in range(count):
        other = difference.clone()
        is_descriptor = number % 2 == 0 or len(other) == start
        at = drawn(0, start) if is_descriptor else drawn(start, len(other))
        other[at] ^= 1 << drawn(0, 8)
        yield other
    yield difference[:-1]
    yield difference[: start - 1]
    yield torch.cat([difference, difference[:2]])
    # Of the right length in all, but one block is longer and the next one shorter.
    lengths = difference.clone()
    lengths[:start].view(torch.int16)[:2] += torch.tensor([1, -1])[: start // 2]
    yield lengths
    yield torch.randint(0, 256, difference.shape, dtype=torch.uint8, generator=generator)


def wrong_verdicts(
    difference: Tensor, old: Tensor, codec: DifferenceCodec, device: torch.device
) -> list[str]:
    """What ``codec`` makes of damaged bytes otherwise than plain torch: verdict and values.

    What surrounds the bytes must not matter.
    """
    expected, values = decoded(REFERENCE, difference, old)
    wrong = []
    for around in (0, 255):
        found = decoded(codec, difference.to(device), old.to(device), around)
        if found[0] != expected:
            wrong.append(f"{old.numel()} of {old.dtype}: verdict {found[0]} of damaged bytes")
        elif expected and not torch.equal(found[1].cpu(), values):
            wrong.append(f"{old.numel()} of {old.dtype}: values of damaged bytes")
    return wrong
