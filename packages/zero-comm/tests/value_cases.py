"""Tensors as gradients are and as they are not, and a codec of values held against plain torch."""

from collections.abc import Iterator

import torch
from difference_cases import DTYPES, GAP, integers_of
from hypothesis import strategies as st
from torch import Tensor

from zero_comm.differences.difference_format import BLOCK_NUMEL
from zero_comm.values.codec import ValueCodec
from zero_comm.values.torch_codec import TorchCodec
from zero_comm.values.value_format import max_values_nbytes

MODES = set(range(9))
REFERENCE = TorchCodec()


def values_of(numel: int, dtype: torch.dtype, octaves: float, zeros: float, seed: int) -> Tensor:
    """Numbers whose exponents are spread over ``octaves``; a share of them are ``zeros``.

    With more octaves than exponents there are, any bits.
    """
    generator = torch.Generator().manual_seed(seed)
    bits = 8 * dtype.itemsize
    integers = torch.int16 if bits == 16 else torch.int32
    if octaves > 100:
        found = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (numel,), generator=generator)
        return found.to(integers).view(dtype)
    is_there = torch.rand(numel, generator=generator) >= zeros
    size = torch.exp2(-octaves * torch.rand(numel, generator=generator, dtype=torch.float64))
    numbers = size * (1 + torch.rand(numel, generator=generator)) * is_there
    sign = torch.randint(0, 2, (numel,), generator=generator) * 2 - 1
    as_float = torch.bfloat16 if bits == 16 else torch.float32
    if dtype.is_floating_point:
        as_float = dtype
    return (numbers * sign).to(as_float).view(dtype)


def all_value_modes(dtype: torch.dtype) -> Tensor:
    """A few blocks of each kind: between them, every mode of the format."""
    spread = (0.4, 1.5, 3.0, 6.0, 14.0, 30.0, 62.0, 101.0)
    found = [values_of(512, dtype, octaves, 0.0, 3) for octaves in spread]
    found += [values_of(512, dtype, 2.0, zeros, 4) for zeros in (0.01, 0.1, 0.6, 1.0)]
    ones = torch.ones(512).to(dtype)
    few_halves = torch.where(torch.arange(512) % 20 == 0, ones / 2, ones)
    return torch.cat([*found, ones, few_halves, torch.zeros(512).to(dtype)])


def value_cases() -> Iterator[Tensor]:
    """All modes in each size of element, and lengths around whole blocks and tiles."""
    yield all_value_modes(torch.bfloat16)
    yield all_value_modes(torch.float32)
    for dtype in (torch.bfloat16, torch.float32):  # one code, at the end of the buffer
        yield torch.where(torch.arange(BLOCK_NUMEL) % 3 == 0, -0.0, 0.0).to(dtype)
    for index, numel in enumerate((0, 1, 2, 3, 255, 256, 257, 1000, 2047, 2049)):
        octaves = (1, 4, 20, 101)[index % 4]
        yield values_of(numel, DTYPES[index % len(DTYPES)], octaves, 0.0, index)
        yield values_of(numel, DTYPES[(index + 2) % len(DTYPES)], octaves, 0.3, index)


@st.composite
def any_values(draw: st.DrawFn) -> Tensor:
    """Any length and spread, with a few elements of any bits."""
    dtype = draw(st.sampled_from(DTYPES))
    numel = draw(st.one_of(st.sampled_from([0, 1, 255, 256, 257, 512]), st.integers(0, 1200)))
    octaves, zeros = draw(st.floats(0, 120)), draw(st.sampled_from([0.0, 0.02, 0.5, 1.0]))
    found = values_of(numel, dtype, octaves, zeros, draw(st.integers(0, 2**32)))
    bits = 8 * dtype.itemsize
    special = st.one_of(
        st.sampled_from([0, 1, 0x7F80, 0x7FC1, 0x8000, 0x7C01]), st.integers(0, 2**bits - 1)
    )
    for place, pattern in draw(
        st.lists(st.tuples(st.integers(0, max(0, numel - 1)), special), max_size=6 if numel else 0)
    ):
        integers_of(found)[place] = pattern - 2**bits * (pattern >> (bits - 1))
    return found


def encoded_values(codec: ValueCodec, values: Tensor) -> Tensor:
    """The bytes of the values, made between bytes that must stay as they are."""
    nbytes = max_values_nbytes(values.numel(), values.element_size())
    out = torch.full((GAP + nbytes + GAP,), 7, dtype=torch.uint8, device=values.device)
    length = codec.encode(values, out[GAP : GAP + nbytes])
    assert (length.dtype, length.dim(), length.device) == (torch.int64, 0, values.device)
    assert int(length) <= nbytes
    assert (out[:GAP] == 7).all()
    assert (out[GAP + nbytes :] == 7).all()
    return out[GAP : GAP + int(length)]


def decoded_values(
    codec: ValueCodec, buffer: Tensor, like: Tensor, around: int = 7
) -> tuple[bool, Tensor]:
    """Whether the bytes are good, and the values: both between others, which must not matter."""
    numel, nbytes = like.numel(), buffer.numel()
    placed = torch.full((GAP + nbytes + GAP,), around, dtype=torch.uint8, device=like.device)
    placed[GAP : GAP + nbytes] = buffer
    integers = integers_of(like)
    values = torch.full((GAP + numel + GAP,), 77, dtype=integers.dtype, device=like.device)
    own = values[GAP : GAP + numel]
    is_good = bool(codec.decode(placed[GAP : GAP + nbytes], own.view(like.dtype)))
    assert (values[:GAP] == 77).all()
    assert (values[GAP + numel :] == 77).all()
    return is_good, own


def wrong_values(values: Tensor, codec: ValueCodec, device: torch.device) -> list[str]:
    """What ``codec`` does otherwise than plain torch on a CPU does: one line each."""
    what = f"{values.numel()} of {values.dtype}"
    expected = encoded_values(REFERENCE, values)
    found = encoded_values(codec, values.to(device))
    wrong = [] if torch.equal(found.cpu(), expected) else [f"{what}: bytes"]
    is_good, back = decoded_values(codec, expected.to(device), values.to(device))
    if not is_good or not torch.equal(back.cpu(), integers_of(values)):
        wrong.append(f"{what}: values")
    return wrong


def wrong_value_verdicts(
    buffer: Tensor, like: Tensor, codec: ValueCodec, device: torch.device
) -> list[str]:
    """What ``codec`` makes of damaged bytes otherwise than plain torch: verdict and values.

    What surrounds the bytes must not matter.
    """
    expected, values = decoded_values(REFERENCE, buffer, like)
    wrong = []
    for around in (0, 255):
        found = decoded_values(codec, buffer.to(device), like.to(device), around)
        if found[0] != expected:
            wrong.append(f"{like.numel()} of {like.dtype}: verdict {found[0]} of damaged bytes")
        elif expected and not torch.equal(found[1].cpu(), values):
            wrong.append(f"{like.numel()} of {like.dtype}: values of damaged bytes")
    return wrong
