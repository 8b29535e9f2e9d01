"""Lossless codecs in plain torch operations for every device. Other codecs must match their bytes.

The notes of `zero_comm.lossless.block_frame` define the bytes. A **ragged list** concatenates the
n[r] integers of every row r. A tensor ``rows`` holds the row of each integer.
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


class _NotBlocksError(ValueError):
    """No encoder can have written these bytes."""


def _require(holds: Tensor) -> None:
    if not bool(holds.all()):
        raise _NotBlocksError


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Mode, bytes, offset in the codes, and number of elements of each block: int64, 1-D."""

    mode: Tensor
    nbytes: Tensor
    offsets: Tensor
    present: Tensor
    itemsize: int


class TorchCodec(ABC):
    """`zero_comm.lossless.codec.Codec` in torch operations. Subclasses implement one coding.

    Bits of elements are non-negative int64, [blocks, 256]. An encoder writes codes as int64, one
    byte each. A decoder reads uint8.
    """

    name = "torch"

    @abstractmethod
    def _measure(
        self, bits: list[Tensor], present: Tensor, itemsize: int
    ) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """Return the integers to code, whether each block is empty, and its sizes by mode above 1.

        A mode that a block cannot have takes ``_IMPOSSIBLE`` bytes.
        """

    @abstractmethod
    def _write(self, out: Tensor, coded: Tensor, blocks: _Blocks) -> None:
        """Write the blocks of modes above 1 into ``out``, which holds zeros there."""

    @abstractmethod
    def _read(self, codes: Tensor, old: Tensor, blocks: _Blocks) -> Tensor:
        """Return the new bits of all blocks except raw ones. ``old`` holds the old elements."""

    def encode(self, *operands: Tensor, out: Tensor, num_threads: int | None = None) -> Tensor:
        numel, end = operands[0].numel(), frame.descriptors_nbytes(operands[0].numel())
        descriptors = out[:end].view(torch.int16)
        for first in range(0, frame.num_blocks(numel), _CHUNK_BLOCKS):
            chunk = slice(first * BLOCK_NUMEL, (first + _CHUNK_BLOCKS) * BLOCK_NUMEL)
            found, codes = self._encode_chunk([operand[chunk] for operand in operands])
            descriptors[first : first + _CHUNK_BLOCKS] = found
            out[end : end + codes.numel()] = codes
            end += codes.numel()
        return torch.tensor(end, device=out.device)

    def _encode_chunk(self, operands: list[Tensor]) -> tuple[Tensor, Tensor]:
        new, numel, itemsize = operands[-1], operands[-1].numel(), operands[-1].element_size()
        bits = [_bits(x) for x in operands]
        present = _present_in(len(bits[0]), new)
        coded, is_empty, candidates = self._measure(bits, present, itemsize)
        # The mode is in the lowest 4 bits, so the minimum prefers the lowest mode of equal size.
        best = present * itemsize * 16 + frame.RAW
        for further_mode, found in candidates.items():
            best = torch.minimum(best, found * 16 + further_mode)
        best = torch.where(is_empty, frame.EMPTY, best)
        mode, nbytes = best % 16, best // 16
        offsets = nbytes.cumsum(0) - nbytes
        out = torch.zeros(int(nbytes.sum()), dtype=torch.int64, device=new.device)
        raw = torch.nonzero(mode == frame.RAW)[:, 0]
        padded = torch.nn.functional.pad(
            new.view(torch.uint8), (0, -numel % BLOCK_NUMEL * itemsize)
        )
        rows, places = _ragged(nbytes[raw])
        out[offsets[raw][rows] + places] = padded.view(len(mode), -1)[raw[rows], places].long()
        self._write(out, coded, _Blocks(mode, nbytes, offsets, present, itemsize))
        descriptors = mode * (1 << frame.MODE_SHIFT) + nbytes
        return descriptors.to(torch.int32).to(torch.int16), out.to(torch.uint8)

    def decode(self, buffer: Tensor, values: Tensor) -> Tensor:
        try:
            self._decode(buffer, values)
        except _NotBlocksError:
            return torch.tensor(False, device=values.device)
        return torch.tensor(True, device=values.device)

    def _decode(self, buffer: Tensor, values: Tensor) -> None:
        start = frame.descriptors_nbytes(values.numel())
        if buffer.numel() < start:
            raise _NotBlocksError
        descriptors = buffer[:start].view(torch.int16).to(torch.int64) & 0xFFFF
        codes, nbytes = buffer[start:], descriptors & frame.NBYTES_MASK
        if int(nbytes.sum()) != codes.numel():
            raise _NotBlocksError
        offsets = nbytes.cumsum(0) - nbytes
        for first in range(0, len(descriptors), _CHUNK_BLOCKS):
            chunk = slice(first, first + _CHUNK_BLOCKS)
            elements = values[first * BLOCK_NUMEL : (first + _CHUNK_BLOCKS) * BLOCK_NUMEL]
            begin = int(offsets[first])
            own = codes[begin : begin + int(nbytes[chunk].sum())]
            self._decode_chunk(own, descriptors[chunk], offsets[chunk] - begin, elements)

    def _decode_chunk(
        self, codes: Tensor, descriptors: Tensor, offsets: Tensor, values: Tensor
    ) -> None:
        itemsize = values.element_size()
        mode, nbytes = descriptors >> frame.MODE_SHIFT, descriptors & frame.NBYTES_MASK
        present = _present_in(len(mode), values)
        _require((mode != frame.EMPTY) | (nbytes == 0))
        _require((mode != frame.RAW) | (nbytes == present * itemsize))
        blocks = _Blocks(mode, nbytes, offsets, present, itemsize)
        new = self._read(codes, values, blocks).flatten()[: values.numel()]
        # Bits above the largest signed integer become negative, or the conversion would overflow.
        signed = new - ((new >> (8 * itemsize - 1)) << 8 * itemsize)
        values.view(INTEGERS[itemsize]).copy_(signed)
        raw = torch.nonzero(mode == frame.RAW)[:, 0]
        rows, places = _ragged(nbytes[raw])
        taken = codes[offsets[raw][rows] + places]
        values.view(torch.uint8)[raw[rows] * BLOCK_NUMEL * itemsize + places] = taken


def _bits(values: Tensor) -> Tensor:
    """Return the bits of elements as [blocks, 256], with zeros for absent elements."""
    itemsize = values.element_size()
    bits = values.view(INTEGERS[itemsize]).to(torch.int64) & ((1 << 8 * itemsize) - 1)
    return torch.nn.functional.pad(bits, (0, -len(bits) % BLOCK_NUMEL)).view(-1, BLOCK_NUMEL)


def _present_in(num: int, values: Tensor) -> Tensor:
    first = torch.arange(num, device=values.device) * BLOCK_NUMEL
    return (values.numel() - first).clamp(max=BLOCK_NUMEL)


def _ragged(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row of each element of a ragged list, and its number within the row."""
    index = torch.arange(len(counts), device=counts.device)
    rows = index.repeat_interleave(counts)
    starts = counts.cumsum(0) - counts
    return rows, torch.arange(len(rows), device=counts.device) - starts[rows]


class TorchDifferences(TorchCodec):
    """Codec of [Note: the difference buffer]. The coded integers are ``z``."""

    def _measure(
        self, bits: list[Tensor], present: Tensor, itemsize: int
    ) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        old, new = bits
        num_bits, top, mask = 8 * itemsize, 1 << (8 * itemsize - 1), (1 << 8 * itemsize) - 1
        moved = _ordered(new, itemsize) - _ordered(old, itemsize)
        signed = ((moved + top) & mask) - top
        z = torch.where(signed < 0, -2 * signed - 1, 2 * signed)
        changed = (z > 0).sum(1)
        whole = torch.full_like(changed, BLOCK_NUMEL)
        candidates = {}
        for start in range(frame.num_starts(itemsize)):
            width = 2 << start
            of_changed = _levels_nbytes(z - 1, changed, width, num_bits)
            listed = torch.where(changed < BLOCK_NUMEL, 1 + changed + of_changed, _IMPOSSIBLE)
            candidates[frame.LIST + start] = listed
            candidates[frame.BITMAP + start] = frame.BITMAP_NBYTES + of_changed
            candidates[frame.DENSE + start] = _levels_nbytes(z, whole, width, num_bits)
        return z, changed == 0, candidates

    def _write(self, out: Tensor, coded: Tensor, blocks: _Blocks) -> None:
        for start in range(frame.num_starts(blocks.itemsize)):
            for layout in (frame.DENSE, frame.BITMAP, frame.LIST):
                of_mode = torch.nonzero(blocks.mode == layout + start)[:, 0]
                offsets, z = blocks.offsets[of_mode], coded[of_mode]
                if layout == frame.DENSE:
                    index = torch.arange(len(of_mode), device=out.device)
                    rows, values = index.repeat_interleave(BLOCK_NUMEL), z.flatten()
                else:
                    rows, at = torch.nonzero(z, as_tuple=True)
                    values = z[rows, at] - 1
                if layout == frame.BITMAP:
                    out.index_add_(0, offsets[rows] + at // 8, 1 << at % 8)
                    offsets = offsets + frame.BITMAP_NBYTES
                elif layout == frame.LIST:
                    counts = torch.bincount(rows, minlength=len(of_mode))
                    out[offsets] = counts
                    out[offsets[rows] + 1 + _ragged(counts)[1]] = at
                    offsets = offsets + 1 + counts
                _write_levels(out, offsets, rows, values, 2 << start, blocks.itemsize)

    def _read(self, codes: Tensor, old: Tensor, blocks: _Blocks) -> Tensor:
        codes, bits = codes.to(torch.int64), _bits(old)
        z = torch.zeros_like(bits)
        is_known = (blocks.mode == frame.EMPTY) | (blocks.mode == frame.RAW)
        for start in range(frame.num_starts(blocks.itemsize)):
            for layout in (frame.DENSE, frame.BITMAP, frame.LIST):
                is_here = blocks.mode == layout + start
                is_known |= is_here
                of_mode = torch.nonzero(is_here)[:, 0]
                if not len(of_mode):
                    continue
                begin = blocks.offsets[of_mode]
                end, sizes = begin + blocks.nbytes[of_mode], (2 << start, blocks.itemsize)
                if layout == frame.DENSE:
                    counts = torch.full_like(begin, BLOCK_NUMEL)
                    z[of_mode] = _read_levels(codes, begin, end, counts, *sizes).view(
                        -1, BLOCK_NUMEL
                    )
                    continue
                if layout == frame.BITMAP:
                    _require(end - begin >= frame.BITMAP_NBYTES)
                    at = torch.arange(BLOCK_NUMEL, device=codes.device)
                    bitmap = codes[begin[:, None] + at // 8] >> at % 8 & 1
                    offsets = begin + frame.BITMAP_NBYTES
                else:
                    bitmap, offsets = _read_list(codes, begin, end)
                counts = bitmap.sum(1)
                _require(counts > 0)
                bitmap[bitmap > 0] = _read_levels(codes, offsets, end, counts, *sizes) + 1
                z[of_mode] = bitmap
        _require(is_known)
        mask = (1 << 8 * blocks.itemsize) - 1
        z &= mask
        moved = torch.where(z % 2 == 1, -(z + 1) // 2, z // 2)
        integers, top = (_ordered(bits, blocks.itemsize) + moved) & mask, (mask + 1) // 2
        return torch.where(integers >= top, integers - top, mask - integers)


def _ordered(bits: Tensor, itemsize: int) -> Tensor:
    top, mask = 1 << (8 * itemsize - 1), (1 << 8 * itemsize) - 1
    return torch.where(bits >= top, mask - bits, bits + top)


def _level_nbytes(numel: Tensor, width: int) -> Tensor:
    return (numel * width + 7) // 8


def _levels_nbytes(values: Tensor, counts: Tensor, width: int, bits: int) -> Tensor:
    """Return the bytes of the levels of each block's non-negative ``values``, [blocks, 256].

    ``counts`` is the number of non-negative values per block. Negative values are not stored.
    """
    nbytes, bound = _level_nbytes(counts, width), 0
    while width < bits:
        bound, width = bound + (1 << width) - 1, 2 * width
        nbytes = nbytes + _level_nbytes((values >= bound).sum(1), width)
    return nbytes


def _code_places(places: Tensor, q: Tensor, width: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield byte offset, shift within the byte, and lowest bit of each byte-sized part of codes.

    ``places`` holds the number of each code within its row, ``q`` the bytes of its row's level.
    """
    if width < 8:
        part = (places >= q).long()  # comparisons are faster than a division by q
        for number in range(2, 8 // width):
            part += places >= number * q
        yield places - part * q, part * width, 0
        return
    for byte in range(width // 8):
        yield places * (width // 8) + byte, torch.zeros_like(places), 8 * byte


def _write_levels(
    out: Tensor, offsets: Tensor, rows: Tensor, values: Tensor, width: int, itemsize: int
) -> None:
    """Write the levels of a ragged list. Those of row r start at byte ``offsets[r]``."""
    while len(rows):
        counts = torch.bincount(rows, minlength=len(offsets))
        largest = (1 << width) - 1
        codes, q = values.clamp(max=largest), _level_nbytes(counts, width)
        for byte, shift, low in _code_places(_ragged(counts)[1], q[rows], width):
            part = (codes >> low) & 0xFF
            out.index_add_(0, offsets[rows] + byte, part << shift)
        if width == 8 * itemsize:
            return
        is_longer = values >= largest
        rows, values = rows[is_longer], values[is_longer] - largest
        offsets, width = offsets + q, 2 * width


def _read_list(codes: Tensor, begin: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Return which elements changed, int64 [blocks, 256], and the offset of the levels."""
    _require(end > begin)
    counts = codes[begin]
    _require(end - begin > counts)
    rows, places = _ragged(counts)
    at = codes[begin[rows] + 1 + places]
    _require((at[1:] > at[:-1]) | (rows[1:] != rows[:-1]))
    bitmap = begin.new_zeros(len(begin), BLOCK_NUMEL)
    bitmap[rows, at] = 1
    return bitmap, begin + 1 + counts


def _read_levels(
    codes: Tensor, offsets: Tensor, ends: Tensor, counts: Tensor, width: int, itemsize: int
) -> Tensor:
    """Return the integers of a ragged list whose levels fill bytes ``offsets`` to ``ends``."""
    q = _level_nbytes(counts, width)
    _require(offsets + q <= ends)
    rows, places = _ragged(counts)
    values = torch.zeros_like(rows)
    for byte, shift, low in _code_places(places, q[rows], width):
        part = codes[offsets[rows] + byte] >> shift
        values += (part & min((1 << width) - 1, 0xFF)) << low
    offsets = offsets + q
    is_longer = values == (1 << width) - 1
    if width == 8 * itemsize:
        is_longer = torch.zeros_like(is_longer)
    counts = torch.bincount(rows[is_longer], minlength=len(offsets))
    is_last = counts == 0
    _require(offsets[is_last] == ends[is_last])
    others = torch.nonzero(~is_last)[:, 0]
    if len(others):
        rest = offsets[others], ends[others], counts[others]
        values[is_longer] += _read_levels(codes, *rest, 2 * width, itemsize)
    return values


class TorchValues(TorchCodec):
    """Codec of [Note: the value buffer], which codes rotated bytes, [blocks, itemsize, 256]."""

    def _measure(
        self, bits: list[Tensor], present: Tensor, itemsize: int
    ) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        (values,) = bits
        rotated = (values << 1) | (values >> (8 * itemsize - 1))
        shifts = 8 * torch.arange(itemsize, device=values.device)[:, None]
        coded = (rotated[:, None] >> shifts) & 0xFF
        codes = coded[:, -1].amax(1, keepdim=True) - coded[:, -1]
        is_whole, candidates = present == BLOCK_NUMEL, {}
        for width in range(frame.MAX_WIDTH + 1):
            escaped = (codes >= (1 << width) - 1).sum(1) if width else torch.zeros_like(present)
            is_allowed = is_whole if width else is_whole & (codes.amax(1) == 0)
            nbytes = frame.fixed_nbytes(width, itemsize) + escaped
            candidates[frame.CODED + width] = torch.where(is_allowed, nbytes, _IMPOSSIBLE)
        return coded, (values == 0).all(1), candidates

    def _write(self, out: Tensor, coded: Tensor, blocks: _Blocks) -> None:
        for width in range(frame.MAX_WIDTH + 1):
            rows = torch.nonzero(blocks.mode == frame.CODED + width)[:, 0]
            if not len(rows):
                continue
            largest, tops = (1 << width) - 1, coded[rows, -1]
            base = tops.amax(1, keepdim=True)
            codes = (base - tops).clamp(max=largest)
            planes = (codes[:, None] >> torch.arange(width, device=out.device)[:, None]) & 1
            packed = planes.view(len(rows), -1, 8) << torch.arange(8, device=out.device)
            fixed = torch.cat([base, coded[rows, :-1].flatten(1), packed.sum(2)], 1)
            at = blocks.offsets[rows, None]
            out[at + torch.arange(fixed.shape[1], device=out.device)] = fixed
            if width:
                is_escape = codes == largest
                target = at + fixed.shape[1] + is_escape.cumsum(1) - 1
                out[target[is_escape]] = tops[is_escape]

    def _read(self, codes: Tensor, old: Tensor, blocks: _Blocks) -> Tensor:
        itemsize, width = blocks.itemsize, blocks.mode - frame.CODED
        escapes = blocks.nbytes - frame.fixed_nbytes(0, itemsize) - width * frame.BITMAP_NBYTES
        is_coded = (width >= 0) & (width <= frame.MAX_WIDTH) & (blocks.present == BLOCK_NUMEL)
        _require(
            (blocks.mode == frame.EMPTY) | (blocks.mode == frame.RAW) | (is_coded & (escapes >= 0))
        )
        device = codes.device
        filled = torch.zeros(len(width), BLOCK_NUMEL, dtype=torch.int64, device=device)
        for number in range(frame.MAX_WIDTH + 1):
            rows = torch.nonzero(width == number)[:, 0]
            if not len(rows):
                continue
            at, low_nbytes = blocks.offsets[rows, None], (itemsize - 1) * BLOCK_NUMEL
            size = frame.fixed_nbytes(number, itemsize)
            own = codes[at + torch.arange(size, device=device)].to(torch.int64)
            low = own[:, 1 : 1 + low_nbytes].view(len(rows), itemsize - 1, BLOCK_NUMEL)
            planes = own[:, 1 + low_nbytes :].view(len(rows), number, frame.BITMAP_NBYTES, 1)
            each = ((planes >> torch.arange(8, device=device)) & 1).flatten(2)
            less = (each << torch.arange(number, device=device)[:, None]).sum(1)
            tops = (own[:, :1] - less) & 0xFF
            is_escape = less == (1 << number) - 1 if number else torch.zeros_like(less).bool()
            _require(is_escape.sum(1) == escapes[rows])
            tops[is_escape] = codes[(at + size + is_escape.cumsum(1) - 1)[is_escape]].long()
            rotated = tops << 8 * (itemsize - 1)
            for k in range(itemsize - 1):
                rotated |= low[:, k] << 8 * k
            filled[rows] = (rotated >> 1) | ((rotated & 1) << (8 * itemsize - 1))
        return filled


CODECS: Final = {"differences": TorchDifferences(), "values": TorchValues()}
