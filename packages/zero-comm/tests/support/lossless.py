"""The two lossless codings behind one interface, and checks of their codecs against plain torch.

A coding transfers ``new`` to a receiver that has ``old``, as differences or as values.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from zero_comm import (
    CorruptMessageError,
    apply_difference,
    decode_values,
    encode_difference,
    encode_values,
)
from zero_comm.lossless.block_frame import Coding, descriptors_nbytes, max_buffer_nbytes
from zero_comm.lossless.codec import find_codec
from zero_comm.lossless.message import Checks, GradientMessages, max_message_nbytes, pack, unpack
from zero_comm.lossless.torch_codec import TorchDifferences, TorchValues

DTYPES = (torch.bfloat16, torch.float16, torch.int16, torch.float32, torch.int32)
GAP = 16  # bytes or elements around a buffer that must not change
VERSIONS, SENDER = (7, 8), 5
Pair = tuple[Tensor, Tensor]


def integers_of(x: Tensor) -> Tensor:
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def any_bits(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    most = 2 ** (8 * dtype.itemsize - 1)
    return torch.randint(-most, most, (numel,), generator=generator)


class Lossless:
    """A coding, its codecs, and the tensors to test it with."""

    name: Coding
    modes: ClassVar[dict[int, set[int]]]  # possible modes by itemsize
    shares: ClassVar[Sequence[float]]  # values of ``share`` for `pair`
    reference: Any  # the plain torch codec
    pair: Callable[
        [int, torch.dtype, float, float, int], Pair
    ]  # (numel, dtype, share, octaves, seed)
    all_modes: Callable[[torch.dtype], Pair]  # tensors with blocks of all modes
    # The package's functions and messages, called with ``old`` and ``new``.
    encode_checked: Callable[[Tensor, Tensor], Tensor]
    decode_checked: Callable[[Tensor, Tensor], None]
    message: Callable[[Tensor, Tensor], Tensor]
    unpack: Callable[[Tensor, Tensor], None]

    def find(self, device: torch.device) -> Any:
        return find_codec(self.name, device)

    def cases(self, most: int) -> Iterator[Pair]:
        """Yield pairs with all modes, both itemsizes, and lengths near whole blocks up to ``most``.

        If ``most`` is below 2049, the pairs with all modes have one block of each mode.
        """
        for dtype in (torch.bfloat16, torch.float32):
            old, new = self.all_modes(dtype)
            modes = modes_in(self.encoded(self.reference, old, new), old.numel())
            blocks = [*{mode: place for place, mode in enumerate(modes)}.values()]
            if most < 2049:
                old, new = (x.view(-1, 256)[blocks].flatten() for x in (old, new))
            yield old, new
            zeros = torch.where(torch.arange(256) % 3 == 0, -0.0, 0.0).to(dtype)
            yield torch.zeros_like(zeros), zeros
        for index, numel in enumerate((0, 1, 3, 255, 256, 257, most)):
            for dtype in (DTYPES[index % 3], DTYPES[3 + index % 2]):  # one dtype of each itemsize
                share = (0.02, 0.3, 1.0)[(index + dtype.itemsize) % 3]
                yield self.pair(numel, dtype, share, (1, 5, 9, 14, 20)[index % 5], index)
        yield self.pair(most, torch.bfloat16, 0.0, 20, 7)

    @property
    def pairs(self) -> st.SearchStrategy[Pair]:
        """Strategy for pairs of at most 1,200 elements, some of which have arbitrary bits."""

        @st.composite
        def draw_pair(draw: st.DrawFn) -> Pair:
            dtype = draw(st.sampled_from(DTYPES))
            numel = draw(st.one_of(st.sampled_from([0, 1, 255, 256, 257]), st.integers(0, 1200)))
            share, octaves = draw(st.sampled_from(self.shares)), draw(st.floats(0, 120))
            both = self.pair(numel, dtype, share, octaves, draw(st.integers(0, 2**32)))
            bits = 8 * dtype.itemsize
            pattern = st.one_of(st.sampled_from(SPECIAL[bits]), st.integers(0, 2**bits - 1))
            places = st.tuples(st.integers(0, max(0, numel - 1)), pattern, pattern)
            for at, *patterns in draw(st.lists(places, max_size=9 if numel else 0)):
                for x, found in zip(both, patterns, strict=True):
                    integers_of(x)[at] = found - 2**bits * (found >> (bits - 1))
            return both

        return draw_pair()

    def encoded(self, codec: Any, old: Tensor, new: Tensor) -> Tensor:
        """Encode into the middle of a larger buffer, and check that its ends are unchanged."""
        nbytes = max_buffer_nbytes(old.numel(), old.element_size())
        out = torch.full((GAP + nbytes + GAP,), 7, dtype=torch.uint8, device=old.device)
        operands = (old, new) if self.name == "differences" else (new,)
        length = codec.encode(*operands, out=out[GAP : GAP + nbytes])
        assert (length.dtype, length.dim(), length.device) == (torch.int64, 0, old.device)
        assert int(length) <= nbytes
        assert (out[:GAP] == 7).all()
        assert (out[GAP + nbytes :] == 7).all()
        return out[GAP : GAP + int(length)]

    def check(self, device: torch.device, old: Tensor, new: Tensor) -> None:
        """Check that the device's codec writes and reads the same bytes as plain torch."""
        codec, expected = self.find(device), self.encoded(self.reference, old, new)
        assert torch.equal(self.encoded(codec, old.to(device), new.to(device)).cpu(), expected)
        is_good, values = decoded(codec, expected.to(device), old.to(device))
        assert is_good
        assert torch.equal(values.cpu(), integers_of(new))

    def check_verdict(self, device: torch.device, buffer: Tensor, old: Tensor) -> bool:
        """Check that the device's codec treats a damaged buffer as plain torch does.

        Return whether plain torch accepts the buffer.
        """
        expected, values = decoded(self.reference, buffer, old)
        for around in (0, 255):
            found = decoded(self.find(device), buffer.to(device), old.to(device), around)
            assert found[0] == expected
            assert not expected or torch.equal(found[1].cpu(), values)
        return expected


# Bits of zeros, denormals, infinities and NaN, with both signs.
SPECIAL = {
    16: [x | sign for x in (0, 1, 0x7C00, 0x7E01, 0x7F80, 0x7F81, 0x7FFF) for sign in (0, 1 << 15)],
    32: [x | sign for x in (0, 1, 0x7F800000, 0x7F800001, 0x7FC01234) for sign in (0, 1 << 31)],
}


class Differences(Lossless):
    """Differences of arbitrary bits: a ``share`` of elements changes, by up to ``2**octaves``."""

    name = "differences"
    modes: ClassVar = {2: {0, 1, 2, 3, 4, 6, 7, 8, 10, 11, 12}, 4: set(range(14))}
    shares = (0.0, 0.01, 0.1, 0.5, 1.0)
    reference = TorchDifferences()
    encode_checked = staticmethod(encode_difference)

    def pair(self, numel: int, dtype: torch.dtype, share: float, octaves: float, seed: int) -> Pair:
        generator = torch.Generator().manual_seed(seed)
        old = any_bits(numel, dtype, generator)
        octaves = min(octaves, 8 * dtype.itemsize - 1)
        size = torch.exp2(torch.rand(numel, generator=generator, dtype=torch.float64) * octaves)
        size *= (torch.rand(numel, generator=generator) < share).double()
        sign = torch.randint(0, 2, (numel,), generator=generator) * 2 - 1
        integers = torch.int16 if dtype.itemsize == 2 else torch.int32
        new = old + sign * size.round().long()
        return old.to(integers).view(dtype), new.to(integers).view(dtype)

    def all_modes(self, dtype: torch.dtype) -> Pair:
        made = [
            self.pair(256, dtype, share, octaves, seed)
            for seed, share in enumerate(self.shares, 2)
            for octaves in ((0.5, 1, 2, 4, 7, 10, 15, 24, 31) if share else (0,))
            if octaves < 8 * dtype.itemsize
        ]
        old, new = zip(*made, strict=True)
        return torch.cat(old), torch.cat(new)

    def decode_checked(self, buffer: Tensor, values: Tensor) -> None:
        apply_difference(values, buffer)

    def message(self, old: Tensor, new: Tensor) -> Tensor:
        nbytes = max_message_nbytes(old.numel(), old.element_size())
        room = torch.full((nbytes,), 9, dtype=torch.uint8, device=old.device)
        return room[: int(pack("differences", old, new, message=room, versions=VERSIONS))]

    def unpack(self, message: Tensor, values: Tensor) -> None:
        unpack_checked("differences", message, values, VERSIONS)


class Values(Lossless):
    """Values whose exponents spread over ``octaves``, with a ``share`` of zeros.

    With more than 100 octaves the bits are arbitrary.
    """

    name = "values"
    modes: ClassVar = {2: set(range(9)), 4: set(range(9))}
    shares = (0.0, 0.02, 0.5, 1.0)
    reference = TorchValues()
    decode_checked = staticmethod(decode_values)

    def pair(self, numel: int, dtype: torch.dtype, share: float, octaves: float, seed: int) -> Pair:
        generator = torch.Generator().manual_seed(seed)
        integers, floats = torch.int16, torch.bfloat16
        if dtype.itemsize == 4:
            integers, floats = torch.int32, torch.float32
        if octaves > 100:
            new = any_bits(numel, dtype, generator).to(integers).view(dtype)
            return torch.zeros_like(new), new
        is_there = torch.rand(numel, generator=generator) >= share
        size = torch.exp2(-octaves * torch.rand(numel, generator=generator, dtype=torch.float64))
        numbers = size * (1 + torch.rand(numel, generator=generator)) * is_there
        sign = torch.randint(0, 2, (numel,), generator=generator) * 2 - 1
        new = (numbers * sign).to(dtype if dtype.is_floating_point else floats).view(dtype)
        return torch.zeros_like(new), new

    def all_modes(self, dtype: torch.dtype) -> Pair:
        spread = (0.4, 1.5, 3.0, 6.0, 14.0, 30.0, 62.0, 101.0)
        made = [self.pair(256, dtype, 0.0, octaves, 3)[1] for octaves in spread]
        made += [self.pair(256, dtype, zeros, 2.0, 4)[1] for zeros in (0.01, 0.1, 0.6, 1.0)]
        ones = torch.ones(256).to(dtype)
        few_halves = torch.where(torch.arange(256) % 20 == 0, ones / 2, ones)
        new = torch.cat([*made, ones, few_halves, torch.zeros(256).to(dtype)])
        return torch.zeros_like(new), new

    def encode_checked(self, old: Tensor, new: Tensor) -> Tensor:
        return encode_values(new)

    def message(self, old: Tensor, new: Tensor) -> Tensor:
        messages = GradientMessages(Checks())
        nbytes = messages.max_nbytes(new.dtype, new.numel())
        room = torch.full((nbytes,), 9, dtype=torch.uint8, device=new.device)
        return room[: int(messages.pack(new, room))]

    def unpack(self, message: Tensor, values: Tensor) -> None:
        unpack_checked("values", message, values, (0, 0))


def unpack_checked(coding: Any, message: Tensor, values: Tensor, versions: tuple[int, int]) -> None:
    """Unpack the message of `SENDER`. Also raise the errors that were found on a device."""
    checks, of = Checks(), {"senders": [SENDER], "unit": 3, "versions": versions}
    unpack(coding, message.view(1, -1), [values], checks=checks, **of)
    for unit, error in checks.take():
        assert unit == 3
        raise CorruptMessageError(error)


DIFFERENCES, VALUES = Differences(), Values()


def decoded(codec: Any, buffer: Tensor, old: Tensor, around: int = 7) -> tuple[bool, Tensor]:
    """Decode between guard bytes. Return whether the buffer was accepted, and the values."""
    numel, nbytes = old.numel(), buffer.numel()
    placed = torch.full((GAP + nbytes + GAP,), around, dtype=torch.uint8, device=old.device)
    placed[GAP : GAP + nbytes] = buffer
    integers = integers_of(old)
    values = torch.full((GAP + numel + GAP,), 77, dtype=integers.dtype, device=old.device)
    own = values[GAP : GAP + numel].copy_(integers)
    is_good = int(codec.decode(placed[GAP : GAP + nbytes], own.view(old.dtype))) == nbytes
    assert (values[:GAP] == 77).all()
    assert (values[GAP + numel :] == 77).all()
    return is_good, own


def modes_in(buffer: Tensor, numel: int) -> list[int]:
    descriptors = buffer[: descriptors_nbytes(numel)].cpu().view(torch.int16)
    return [x >> 11 for x in descriptors.tolist()]


def damaged(buffer: Tensor, numel: int, count: int, seed: int) -> Iterator[Tensor]:
    """Yield ``count`` copies of ``buffer`` with a flipped bit, and copies with other damage."""
    generator = torch.Generator().manual_seed(seed)
    start = descriptors_nbytes(numel)

    def drawn(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    for number in range(count):
        other = buffer.clone()
        is_descriptor = number % 2 == 0 or len(other) == start
        at = drawn(0, start) if is_descriptor else drawn(start, len(other))
        other[at] ^= 1 << drawn(0, 8)
        yield other
    yield from (buffer[:-1], buffer[: start - 1], torch.cat([buffer, buffer[:2]]))
    # The total length is right, but not those of the first two blocks.
    lengths = buffer.clone()
    lengths[:start].view(torch.int16)[:2] += torch.tensor([1, -1])[: start // 2]
    yield lengths
    yield torch.randint(0, 256, buffer.shape, dtype=torch.uint8, generator=generator)
