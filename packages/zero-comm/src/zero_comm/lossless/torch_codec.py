"""Lossless codecs in plain torch operations for every device. Other codecs write the same bytes.

The notes of `zero_comm.lossless.block_frame` define the bytes. Shapes depend only on the number of
elements and the dtype, so that the host never waits for a device. Unused positions are masked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from zero_comm.lossless import block_frame as frame
from zero_comm.lossless.block_frame import BLOCK_NUMEL

_CHUNK_BLOCKS: Final = 4096  # limits each int64 workspace of [blocks, 256] to 8 MiB
_IMPOSSIBLE: Final = 1 << 20  # bytes: more than any mode takes
INTEGERS: Final = {2: torch.int16, 4: torch.int32}
_Measured = tuple[Tensor, dict[int, Tensor]]


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Consecutive blocks of a uint8 buffer. Other tensors are int64, [blocks, 1] unless noted."""

    buffer: Tensor
    mode: Tensor
    nbytes: Tensor
    begin: Tensor  # offset of the block's bytes in ``buffer``
    present: Tensor  # number of elements in the block
    lane: Tensor  # [256]: indices of the elements in a block
    itemsize: int

    def store(self, at: Tensor, values: Tensor, is_stored: Tensor, nbytes: int = 1) -> None:
        """Write the low ``nbytes`` of ``values``, lowest first, at ``at`` of the zeroed buffer."""
        at, values = torch.where(is_stored, at, 0), torch.where(is_stored, values, 0)
        for byte in range(nbytes):
            part = (values >> 8 * byte & 0xFF).to(torch.uint8)
            self.buffer.index_add_(0, (at + byte).flatten(), part.flatten())

    def load(self, at: Tensor, is_loaded: Tensor, nbytes: int = 1) -> Tensor:
        """Return int64 values of ``nbytes`` bytes, 0 where masked. ``at`` may exceed the buffer."""
        at, last = torch.where(is_loaded, at, 0), len(self.buffer) - 1
        values = torch.zeros_like(at)
        for byte in range(nbytes):
            values = values + (self.buffer[(at + byte).clamp(max=last)].long() << 8 * byte)
        return torch.where(is_loaded, values, 0)


class TorchCodec(ABC):
    """`zero_comm.lossless.codec.Codec` in torch operations. Subclasses implement one coding.

    Bits of elements are non-negative int64, [blocks, 256].
    """

    name = "torch"

    @abstractmethod
    def _measure(self, bits: list[Tensor], present: Tensor, itemsize: int) -> _Measured:
        """Return the integers to code, and for each mode above 1 the blocks' sizes, [blocks, 1].

        The integers of an empty block are zeros. If a block cannot have a mode, its size is
        ``_IMPOSSIBLE``.
        """

    @abstractmethod
    def _write(self, coded: Tensor, blocks: _Blocks) -> None:
        """Write the blocks of modes above 1."""

    @abstractmethod
    def _read(self, old: Tensor, blocks: _Blocks) -> tuple[Tensor, Tensor]:
        """Return new bits except raw blocks', and whether modes above 1 are sound, [blocks, 1]."""

    def measure(self, *operands: Tensor) -> Tensor:
        end = _full(frame.descriptors_nbytes(operands[0].numel()), operands[0])
        for _, chunk in _chunks(operands[0].numel()):
            end += self._choose([operand[chunk] for operand in operands])[2].sum()
        return end

    def encode(self, *operands: Tensor, out: Tensor, num_threads: int | None = None) -> Tensor:
        numel, itemsize = operands[0].numel(), operands[0].element_size()
        start = frame.descriptors_nbytes(numel)
        descriptors, end = out.zero_()[:start].view(torch.int16), _full(start, out)
        for of_blocks, chunk in _chunks(numel):
            bits, mode, nbytes, coded = self._choose([operand[chunk] for operand in operands])
            found = mode * (1 << frame.MODE_SHIFT) + nbytes
            descriptors[of_blocks] = found.view(-1).to(torch.int32)
            ends = end + nbytes.cumsum(0)
            lane, present = _places(len(mode), operands[0][chunk])
            blocks = _Blocks(out, mode, nbytes, ends - nbytes, present, lane, itemsize)
            is_raw = (mode == frame.RAW) & (lane < present)
            blocks.store(blocks.begin + lane * itemsize, bits, is_raw, itemsize)
            self._write(coded, blocks)
            end = ends[-1, 0]
        return end

    def _choose(self, operands: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the new bits, each block's mode and size in bytes, and the integers to code."""
        itemsize, bits = operands[0].element_size(), [_bits(operand) for operand in operands]
        _, present = _places(len(bits[0]), operands[0])
        coded, candidates = self._measure(bits, present, itemsize)
        # The mode is in the lowest 4 bits, so the minimum prefers the lowest mode of equal size.
        best = present * itemsize * 16 + frame.RAW
        for further_mode, found in candidates.items():
            best = torch.minimum(best, found * 16 + further_mode)
        best = torch.where((coded == 0).all(1, keepdim=True), frame.EMPTY, best)
        return bits[-1], best % 16, best // 16, coded

    def decode(self, buffer: Tensor, values: Tensor) -> Tensor:
        numel, itemsize = values.numel(), values.element_size()
        start, is_good = frame.descriptors_nbytes(numel), _full(1, buffer) > 0
        if buffer.numel() < start:
            return _full(-1, buffer)
        descriptors = buffer[:start].view(torch.int16).to(torch.int64)[:, None] & 0xFFFF
        modes, sizes = descriptors >> frame.MODE_SHIFT, descriptors & frame.NBYTES_MASK
        begins = sizes.cumsum(0) - sizes + start
        for of_blocks, chunk in _chunks(numel):
            elements = values[chunk]
            mode, nbytes, begin = modes[of_blocks], sizes[of_blocks], begins[of_blocks]
            lane, present = _places(len(mode), elements)
            blocks = _Blocks(buffer, mode, nbytes, begin, present, lane, itemsize)
            new, is_sound = self._read(_bits(elements), blocks)
            is_raw = mode == frame.RAW
            raw = blocks.load(begin + lane * itemsize, is_raw & (lane < present), itemsize)
            new = torch.where(is_raw, raw, new).flatten()[: len(elements)]
            # Bits above the largest signed integer become negative, so that the copy fits.
            signed = new - ((new >> (8 * itemsize - 1)) << 8 * itemsize)
            elements.view(INTEGERS[itemsize]).copy_(signed)
            is_sound = torch.where(is_raw, nbytes == present * itemsize, is_sound)
            is_good = is_good & torch.where(mode == frame.EMPTY, nbytes == 0, is_sound).all()
        return torch.where(is_good, sizes.sum() + start, -1)


def _chunks(numel: int) -> Iterator[tuple[slice, slice]]:
    """Yield ranges of blocks that are coded at once, and the ranges of their elements."""
    for first in range(0, frame.num_blocks(numel), _CHUNK_BLOCKS):
        last = first + _CHUNK_BLOCKS
        yield slice(first, last), slice(first * BLOCK_NUMEL, last * BLOCK_NUMEL)


def _full(number: int, like: Tensor) -> Tensor:
    """Return an int64 scalar on the device of ``like``, without a copy from the host."""
    return torch.full((), number, dtype=torch.int64, device=like.device)


def _bits(values: Tensor) -> Tensor:
    """Return the bits of elements as [blocks, 256], with zeros for absent elements."""
    itemsize = values.element_size()
    bits = values.view(INTEGERS[itemsize]).to(torch.int64) & ((1 << 8 * itemsize) - 1)
    return torch.nn.functional.pad(bits, (0, -len(bits) % BLOCK_NUMEL)).view(-1, BLOCK_NUMEL)


def _places(num: int, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices in a block, [256], and each block's number of elements, [num, 1]."""
    first = torch.arange(num, device=values.device)[:, None] * BLOCK_NUMEL
    lane = torch.arange(BLOCK_NUMEL, device=values.device)
    return lane, (values.numel() - first).clamp(max=BLOCK_NUMEL)


class TorchDifferences(TorchCodec):
    """Codec of [Note: the difference buffer]. The coded integers are ``z``."""

    def _measure(self, bits: list[Tensor], present: Tensor, itemsize: int) -> _Measured:
        old, new = bits
        num_bits, top, mask = 8 * itemsize, 1 << (8 * itemsize - 1), (1 << 8 * itemsize) - 1
        moved = _ordered(new, itemsize) - _ordered(old, itemsize)
        signed = ((moved + top) & mask) - top
        z = torch.where(signed < 0, -2 * signed - 1, 2 * signed)
        changed = (z > 0).sum(1, keepdim=True)
        whole = torch.full_like(changed, BLOCK_NUMEL)
        candidates = {}
        for start in range(frame.num_starts(itemsize)):
            width = 2 << start
            of_changed = _levels_nbytes(z - 1, changed, width, num_bits)
            listed = torch.where(changed < BLOCK_NUMEL, 1 + changed + of_changed, _IMPOSSIBLE)
            candidates[frame.LIST + start] = listed
            candidates[frame.BITMAP + start] = frame.BITMAP_NBYTES + of_changed
            candidates[frame.DENSE + start] = _levels_nbytes(z, whole, width, num_bits)
        return z, candidates

    def _write(self, coded: Tensor, blocks: _Blocks) -> None:
        is_list, is_bitmap, is_dense, start = _layout(blocks)
        at, lane = blocks.begin, blocks.lane
        is_member = ((coded > 0) & (is_list | is_bitmap)) | is_dense
        count = is_member.sum(1, keepdim=True)
        blocks.store(at, count, is_list)
        blocks.store(at + is_member.cumsum(1), lane, is_member & is_list)
        blocks.store(at + lane // 8, 1 << lane % 8, is_member & is_bitmap)
        at = at + _header_nbytes(is_list, is_bitmap, count)
        rest = torch.where(is_dense, coded, coded - 1)
        for level in range(frame.num_starts(blocks.itemsize) + 1):
            width, largest, is_begun = 2 << level, (1 << (2 << level)) - 1, start <= level
            is_here = is_member & is_begun
            places, shift, q = _code_places(is_here, width)
            codes = rest.clamp(max=largest) << shift
            blocks.store(at + places, codes, is_here, max(1, width // 8))
            at = at + q
            is_member = is_member & ((rest >= largest) | ~is_begun)
            rest = torch.where(is_begun, rest - largest, rest)

    def _read(self, old: Tensor, blocks: _Blocks) -> tuple[Tensor, Tensor]:
        is_list, is_bitmap, is_dense, start = _layout(blocks)
        begin, end, lane = blocks.begin, blocks.begin + blocks.nbytes, blocks.lane
        is_sound = is_list | is_bitmap | is_dense
        is_sound = is_sound & (blocks.nbytes >= _header_nbytes(is_list, is_bitmap, 0))
        listed = blocks.load(begin, is_list & is_sound)
        at = begin + _header_nbytes(is_list, is_bitmap, listed)
        is_sound = is_sound & (at <= end)
        is_listed = is_list & is_sound & (lane < listed)
        position = blocks.load(begin + 1 + lane, is_listed)
        is_falling = (position[:, 1:] <= position[:, :-1]) & is_listed[:, 1:]
        is_sound = is_sound & ~is_falling.any(1, keepdim=True)
        # Unused entries of ``position`` are 0, and add 0 to the mark of element 0.
        marks = torch.zeros_like(old).scatter_add_(1, position, (is_listed & is_sound).long())
        is_set = (blocks.load(begin + lane // 8, is_bitmap & is_sound) >> lane % 8 & 1) > 0
        is_changed = is_member = ((marks > 0) | is_set | is_dense) & is_sound
        is_sound = is_sound & is_member.any(1, keepdim=True)
        z = torch.zeros_like(old)
        for level in range(frame.num_starts(blocks.itemsize) + 1):
            width, largest, is_begun = 2 << level, (1 << (2 << level)) - 1, start <= level
            is_here = is_member & is_begun
            places, shift, q = _code_places(is_here, width)
            is_sound = is_sound & (at + q <= end)
            is_here = is_here & is_sound
            codes = blocks.load(at + places, is_here, max(1, width // 8)) >> shift & largest
            z, at = z + codes, at + q
            is_member = is_member & is_sound & ((codes == largest) | ~is_begun)
        is_sound = is_sound & (at == end)
        mask = (1 << 8 * blocks.itemsize) - 1
        z = torch.where(is_dense, z, z + 1) & mask
        moved = torch.where(z % 2 == 1, -(z + 1) // 2, z // 2)
        integers, top = (_ordered(old, blocks.itemsize) + moved) & mask, (mask + 1) // 2
        new = torch.where(integers >= top, integers - top, mask - integers)
        return torch.where(is_changed, new, old), is_sound


def _layout(blocks: _Blocks) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return whether each block is a list, a bitmap or dense, and the ``s`` of these blocks."""
    mode, number = blocks.mode, frame.num_starts(blocks.itemsize)
    is_list = (mode >= frame.LIST) & (mode < frame.LIST + number)
    is_bitmap = (mode >= frame.BITMAP) & (mode < frame.BITMAP + number)
    is_dense = (mode >= frame.DENSE) & (mode < frame.DENSE + number)
    return is_list, is_bitmap, is_dense, (mode - frame.LIST) & 3


def _header_nbytes(is_list: Tensor, is_bitmap: Tensor, count: Tensor | int) -> Tensor:
    return torch.where(is_list, 1 + count, torch.where(is_bitmap, frame.BITMAP_NBYTES, 0))


def _ordered(bits: Tensor, itemsize: int) -> Tensor:
    top, mask = 1 << (8 * itemsize - 1), (1 << 8 * itemsize) - 1
    return torch.where(bits >= top, mask - bits, bits + top)


def _level_nbytes(numel: Tensor, width: int) -> Tensor:
    return (numel * width + 7) // 8


def _levels_nbytes(values: Tensor, counts: Tensor, width: int, bits: int) -> Tensor:
    """Return the size in bytes of the levels of each block's ``values``, [blocks, 256].

    ``counts`` is the number of non-negative values per block. Negative values are not stored.
    """
    nbytes, bound = _level_nbytes(counts, width), 0
    while width < bits:
        bound, width = bound + (1 << width) - 1, 2 * width
        nbytes = nbytes + _level_nbytes((values >= bound).sum(1, keepdim=True), width)
    return nbytes


def _code_places(is_here: Tensor, width: int) -> tuple[Tensor, Tensor | int, Tensor]:
    """Return the byte offset and bit shift of each code in a level, and the level's byte count."""
    rank, q = is_here.cumsum(1) - 1, _level_nbytes(is_here.sum(1, keepdim=True), width)
    if width >= 8:
        return rank * (width // 8), 0, q
    part = (rank >= q).long()  # comparisons are faster than a division by q
    for number in range(2, 8 // width):
        part += rank >= number * q
    return rank - part * q, part * width, q


class TorchValues(TorchCodec):
    """Codec of [Note: the value buffer]. The coded integers are the rotated bits."""

    def _measure(self, bits: list[Tensor], present: Tensor, itemsize: int) -> _Measured:
        (values,) = bits
        rotated = (values << 1 | values >> (8 * itemsize - 1)) & ((1 << 8 * itemsize) - 1)
        tops = rotated >> 8 * (itemsize - 1)
        codes = tops.amax(1, keepdim=True) - tops
        is_whole, candidates = present == BLOCK_NUMEL, {}
        for width in range(frame.MAX_WIDTH + 1):
            num_escapes = (codes >= (1 << width) - 1).sum(1, keepdim=True) * (width > 0)
            is_allowed = is_whole if width else is_whole & (codes == 0).all(1, keepdim=True)
            nbytes = frame.fixed_nbytes(width, itemsize) + num_escapes
            candidates[frame.CODED + width] = torch.where(is_allowed, nbytes, _IMPOSSIBLE)
        return rotated, candidates

    def _write(self, coded: Tensor, blocks: _Blocks) -> None:
        itemsize, at, lane = blocks.itemsize, blocks.begin, blocks.lane
        width, fixed_nbytes = _coded_layout(blocks)
        is_coded, tops = blocks.mode >= frame.CODED, coded >> 8 * (itemsize - 1)
        base = tops.amax(1, keepdim=True)
        codes = torch.minimum(base - tops, (1 << width) - 1)
        blocks.store(at, base, is_coded)
        for byte in range(itemsize - 1):
            low = coded >> 8 * byte & 0xFF
            blocks.store(at + 1 + byte * BLOCK_NUMEL + lane, low, is_coded)
        for plane in range(frame.MAX_WIDTH):
            place = at + frame.fixed_nbytes(plane, itemsize) + lane // 8
            bit = (codes >> plane & 1) << lane % 8
            blocks.store(place, bit, is_coded & (width > plane))
        is_escape = is_coded & (width > 0) & (codes == (1 << width) - 1)
        blocks.store(at + fixed_nbytes + is_escape.cumsum(1) - 1, tops, is_escape)

    def _read(self, old: Tensor, blocks: _Blocks) -> tuple[Tensor, Tensor]:
        itemsize, at, lane = blocks.itemsize, blocks.begin, blocks.lane
        width, fixed_nbytes = _coded_layout(blocks)
        num_escapes = blocks.nbytes - fixed_nbytes
        is_sound = (blocks.mode >= frame.CODED) & (blocks.mode <= frame.CODED + frame.MAX_WIDTH)
        is_sound = is_sound & (blocks.present == BLOCK_NUMEL) & (num_escapes >= 0)
        code = torch.zeros_like(old)
        for plane in range(frame.MAX_WIDTH):
            place = at + frame.fixed_nbytes(plane, itemsize) + lane // 8
            code |= (blocks.load(place, is_sound & (width > plane)) >> lane % 8 & 1) << plane
        is_escape = is_sound & (width > 0) & (code == (1 << width) - 1)
        is_sound = is_sound & (is_escape.sum(1, keepdim=True) == num_escapes)
        place = at + fixed_nbytes + is_escape.cumsum(1) - 1
        escape = blocks.load(place, is_escape & is_sound)
        top = torch.where(is_escape, escape, blocks.load(at, is_sound) - code & 0xFF)
        rotated = top << 8 * (itemsize - 1)
        for byte in range(itemsize - 1):
            place = at + 1 + byte * BLOCK_NUMEL + lane
            rotated = rotated | blocks.load(place, is_sound) << 8 * byte
        new = rotated >> 1 | (rotated & 1) << (8 * itemsize - 1)
        return torch.where(is_sound, new, 0), is_sound


def _coded_layout(blocks: _Blocks) -> tuple[Tensor, Tensor]:
    """Return the ``w`` of coded blocks, and their escapes' offset. Undefined for other blocks."""
    width = (blocks.mode - frame.CODED).clamp(0, frame.MAX_WIDTH)
    return width, frame.fixed_nbytes(0, blocks.itemsize) + width * frame.BITMAP_NBYTES


CODECS: Final = {"differences": TorchDifferences(), "values": TorchValues()}
