"""Differences in plain torch operations, on every device: the definition of the others' results.

See [Note: the difference buffer] in `zero_comm.differences.difference_format`. A **ragged** list
has n[r] integers for row r, one row after another; ``rows`` names the row of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor

from zero_comm.differences.difference_format import (
    BITMAP,
    BITMAP_NBYTES,
    BLOCK_NUMEL,
    DENSE,
    LIST,
    MODE_SHIFT,
    RAW,
    SAME,
    descriptors_nbytes,
    num_blocks,
    num_starts,
)

_CHUNK_BLOCKS: Final = 4096  # bounds the workspace: integers of 64 bits
_INTEGERS: Final = {2: torch.int16, 4: torch.int32}


class TorchCodec:
    """`zero_comm.differences.codec.DifferenceCodec` in torch operations."""

    name = "torch"

    def encode(
        self, old: Tensor, new: Tensor, out: Tensor, *, num_threads: int | None = None
    ) -> Tensor:
        return encode_chunks(_encode, (old, new), out)

    def decode(self, buffer: Tensor, values: Tensor) -> Tensor:
        is_good = decode_chunks(lambda *chunk: _Blocks(*chunk).decode(), buffer, values)
        return torch.tensor(is_good, device=values.device)


def encode_chunks(
    encode: Callable[..., tuple[Tensor, Tensor]], operands: tuple[Tensor, ...], out: Tensor
) -> Tensor:
    """Write what ``encode`` returns for some blocks of the operands: descriptors and codes."""
    numel, end = operands[0].numel(), descriptors_nbytes(operands[0].numel())
    descriptors = out[:end].view(torch.int16)
    for first in range(0, num_blocks(numel), _CHUNK_BLOCKS):
        chunk = slice(first * BLOCK_NUMEL, (first + _CHUNK_BLOCKS) * BLOCK_NUMEL)
        found, codes = encode(*(operand[chunk] for operand in operands))
        descriptors[first : first + _CHUNK_BLOCKS] = found
        out[end : end + codes.numel()] = codes
        end += codes.numel()
    return torch.tensor(end, device=out.device)


def decode_chunks(
    decode: Callable[[Tensor, Tensor, Tensor, Tensor], bool], buffer: Tensor, values: Tensor
) -> bool:
    """Call ``decode`` with codes, descriptors, offsets in the codes, and elements of some blocks.

    Return whether the bytes are ones that an encoder may have written.
    """
    numel, start = values.numel(), descriptors_nbytes(values.numel())
    if buffer.numel() < start:
        return False
    descriptors = buffer[:start].view(torch.int16).to(torch.int64) & 0xFFFF
    codes, lengths = buffer[start:], descriptors & ((1 << MODE_SHIFT) - 1)
    if int(lengths.sum()) != codes.numel():
        return False
    offsets = lengths.cumsum(0) - lengths
    for first in range(0, num_blocks(numel), _CHUNK_BLOCKS):
        chunk = slice(first, first + _CHUNK_BLOCKS)
        elements = values[first * BLOCK_NUMEL : (first + _CHUNK_BLOCKS) * BLOCK_NUMEL]
        begin, nbytes = int(offsets[first]), int(lengths[chunk].sum())
        own = codes[begin : begin + nbytes]
        if not decode(own, descriptors[chunk], offsets[chunk] - begin, elements):
            return False
    return True


def _bits(values: Tensor) -> Tensor:
    """Return the bits of a block's elements as integers that aren't negative, [blocks, 256]."""
    itemsize = values.element_size()
    bits = values.view(_INTEGERS[itemsize]).to(torch.int64) & ((1 << 8 * itemsize) - 1)
    absent = -len(bits) % BLOCK_NUMEL
    return torch.nn.functional.pad(bits, (0, absent)).view(-1, BLOCK_NUMEL)


def _ordered(bits: Tensor, itemsize: int) -> Tensor:
    """Return ordered integers. The same maps them back, with the meaning of the top bit turned."""
    top, mask = 1 << (8 * itemsize - 1), (1 << 8 * itemsize) - 1
    return torch.where(bits >= top, mask - bits, bits + top)


def _from_ordered(integers: Tensor, itemsize: int) -> Tensor:
    top, mask = 1 << (8 * itemsize - 1), (1 << 8 * itemsize) - 1
    return torch.where(integers >= top, integers - top, mask - integers)


def _differences(old: Tensor, new: Tensor) -> Tensor:
    """Return ``z``, [blocks, 256]."""
    itemsize = old.element_size()
    top, mask = 1 << (8 * itemsize - 1), (1 << 8 * itemsize) - 1
    moved = _ordered(_bits(new), itemsize) - _ordered(_bits(old), itemsize)
    signed = ((moved + top) & mask) - top
    return torch.where(signed < 0, -2 * signed - 1, 2 * signed)


def _level_nbytes(numel: Tensor, width: int) -> Tensor:
    return (numel * width + 7) // 8


def _levels_nbytes(values: Tensor, counts: Tensor, width: int, bits: int) -> Tensor:
    """Return the bytes of the levels of those of ``values``, [blocks, 256], that count.

    Those that do not count are negative.
    """
    nbytes, bound = _level_nbytes(counts, width), 0
    while width < bits:
        bound, width = bound + (1 << width) - 1, 2 * width
        nbytes = nbytes + _level_nbytes((values >= bound).sum(1), width)
    return nbytes


def _choose(z: Tensor, present: Tensor, itemsize: int) -> tuple[Tensor, Tensor]:
    """Return mode and bytes of each block. ``present``: elements of each block."""
    bits, changed = 8 * itemsize, (z > 0).sum(1)
    whole = torch.full_like(changed, BLOCK_NUMEL)
    candidates = [(RAW, present * itemsize)]
    for start in range(num_starts(itemsize)):
        width = 2 << start
        of_changed = _levels_nbytes(z - 1, changed, width, bits)
        candidates += [
            (LIST + start, torch.where(changed < BLOCK_NUMEL, 1 + changed + of_changed, 1 << 20)),
            (BITMAP + start, BITMAP_NBYTES + of_changed),
            (DENSE + start, _levels_nbytes(z, whole, width, bits)),
        ]
    # The mode in the lowest bits: of the fewest bytes the lowest.
    best = torch.stack([nbytes * 16 + mode for mode, nbytes in candidates]).min(0).values
    best = torch.where(changed > 0, best, SAME)
    return best % 16, best // 16


def _encode(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Return the descriptors (int16) and the codes (uint8) of some blocks."""
    numel, itemsize = old.numel(), old.element_size()
    z = _differences(old, new)
    first = torch.arange(len(z), device=z.device) * BLOCK_NUMEL
    mode, nbytes = _choose(z, (numel - first).clamp(max=BLOCK_NUMEL), itemsize)
    ends = nbytes.cumsum(0)
    out = torch.zeros(int(ends[-1]) if len(ends) else 0, dtype=torch.int64, device=z.device)
    offsets = ends - nbytes

    blocks = torch.nonzero(mode == RAW)[:, 0]
    raw = torch.nn.functional.pad(new.view(torch.uint8), (0, -numel % BLOCK_NUMEL * itemsize))
    rows, places = _ragged(nbytes[blocks])
    out[offsets[blocks][rows] + places] = raw.view(len(z), -1)[blocks[rows], places].long()

    for start in range(num_starts(itemsize)):
        blocks = torch.nonzero(mode == DENSE + start)[:, 0]
        _write_levels(out, offsets[blocks], *_all_of(z[blocks]), start, itemsize)
        blocks = torch.nonzero(mode == BITMAP + start)[:, 0]
        rows, at, values = _changed(z[blocks])
        out.index_add_(0, offsets[blocks][rows] + at // 8, 1 << at % 8)
        _write_levels(out, offsets[blocks] + BITMAP_NBYTES, rows, values, start, itemsize)
        blocks = torch.nonzero(mode == LIST + start)[:, 0]
        rows, at, values = _changed(z[blocks])
        counts = torch.bincount(rows, minlength=len(blocks))
        out[offsets[blocks]] = counts
        out[offsets[blocks][rows] + 1 + _ragged(counts)[1]] = at
        _write_levels(out, offsets[blocks] + 1 + counts, rows, values, start, itemsize)
    descriptors = mode * (1 << MODE_SHIFT) + nbytes
    return descriptors.to(torch.int32).to(torch.int16), out.to(torch.uint8)


def _all_of(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``z`` as a ragged list: rows, values."""
    rows = torch.arange(len(z), device=z.device).repeat_interleave(BLOCK_NUMEL)
    return rows, z.flatten()


def _changed(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the row, the position and ``z - 1`` of what is not zero, as ragged lists."""
    rows, at = torch.nonzero(z, as_tuple=True)
    return rows, at, z[rows, at] - 1


def _ragged(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row of each element of a ragged list, and its number within the row."""
    index = torch.arange(len(counts), device=counts.device)
    rows = index.repeat_interleave(counts)
    starts = counts.cumsum(0) - counts
    return rows, torch.arange(len(rows), device=counts.device) - starts[rows]


def _code_places(places: Tensor, q: Tensor, width: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield byte, shift within it, and the first bit there, of each part of codes of ``width``.

    ``places`` are numbers of codes within their row, ``q`` the bytes of the row's level, for each.
    """
    if width < 8:
        part = (places >= q).long()  # a sum of comparisons: faster than a division
        for number in range(2, 8 // width):
            part += places >= number * q
        yield places - part * q, part * width, 0
        return
    for byte in range(width // 8):
        yield places * (width // 8) + byte, torch.zeros_like(places), 8 * byte


def _write_levels(
    out: Tensor, offsets: Tensor, rows: Tensor, values: Tensor, start: int, itemsize: int
) -> None:
    """Write the levels of a ragged list. Those of row r begin at byte ``offsets[r]``."""
    width = 2 << start
    while len(rows):
        counts = torch.bincount(rows, minlength=len(offsets))
        largest = (1 << width) - 1
        codes, q = values.clamp(max=largest), _level_nbytes(counts, width)
        _, places = _ragged(counts)
        for byte, shift, low in _code_places(places, q[rows], width):
            part = (codes >> low) & 0xFF
            out.index_add_(0, offsets[rows] + byte, part << shift)
        if width == 8 * itemsize:
            return
        is_longer = values >= largest
        rows, values = rows[is_longer], values[is_longer] - largest
        offsets, width = offsets + q, 2 * width


class _Blocks:
    """Some blocks of a buffer, to be decoded, with their ``offsets`` in ``codes``."""

    def __init__(self, codes: Tensor, descriptors: Tensor, offsets: Tensor, values: Tensor) -> None:
        self._codes = codes.to(torch.int64)
        self._mode = descriptors >> MODE_SHIFT
        self._nbytes = descriptors & ((1 << MODE_SHIFT) - 1)
        self._offsets = offsets
        self._values = values
        self._itemsize = values.element_size()
        self._is_good = True

    def decode(self) -> bool:
        """Change the elements. Returns whether the bytes are those of blocks."""
        bits = _bits(self._values)
        z = torch.zeros_like(bits)
        known = (self._mode == SAME) | (self._mode == RAW)
        self._require(self._nbytes[self._mode == SAME] == 0)
        for start in range(num_starts(self._itemsize)):
            for layout, read in (
                (DENSE, self._read_dense),
                (BITMAP, self._read_bitmap),
                (LIST, self._read_list),
            ):
                is_here = self._mode == layout + start
                known |= is_here
                blocks = torch.nonzero(is_here)[:, 0]
                if len(blocks) and self._is_good:
                    read(z, blocks, start)
        self._require(known)
        mask = (1 << 8 * self._itemsize) - 1
        z &= mask
        moved = torch.where(z % 2 == 1, -(z + 1) // 2, z // 2)
        new = _from_ordered((_ordered(bits, self._itemsize) + moved) & mask, self._itemsize)
        new = new.flatten()[: self._values.numel()]
        integers = _INTEGERS[self._itemsize]
        # Through 64 bits: a narrower integer would refuse the upper half of the patterns.
        signed = new - ((new >> (8 * self._itemsize - 1)) << 8 * self._itemsize)
        raw = torch.nonzero(self._mode == RAW)[:, 0]
        first = raw * BLOCK_NUMEL
        present = (self._values.numel() - first).clamp(max=BLOCK_NUMEL)
        self._require(self._nbytes[raw] == present * self._itemsize)
        if not self._is_good:
            return False
        self._values.view(integers).copy_(signed)
        rows, places = _ragged(self._nbytes[raw])
        taken = self._codes[self._offsets[raw][rows] + places].to(torch.uint8)
        self._values.view(torch.uint8)[first[rows] * self._itemsize + places] = taken
        return True

    def _require(self, holds: Tensor) -> None:
        self._is_good = self._is_good and bool(holds.all())

    def _read_dense(self, z: Tensor, blocks: Tensor, start: int) -> None:
        counts = torch.full_like(blocks, BLOCK_NUMEL)
        ends = (self._offsets + self._nbytes)[blocks]
        values = self._read_levels(self._offsets[blocks], ends, counts, 2 << start)
        if values is not None:
            z[blocks] = values.view(-1, BLOCK_NUMEL)

    def _read_bitmap(self, z: Tensor, blocks: Tensor, start: int) -> None:
        self._require(self._nbytes[blocks] >= BITMAP_NBYTES)
        if not self._is_good:
            return
        offsets, ends = self._offsets[blocks], (self._offsets + self._nbytes)[blocks]
        at = torch.arange(BLOCK_NUMEL, device=z.device)
        bitmap = self._codes[offsets[:, None] + at // 8] >> at % 8 & 1
        self._place(z, blocks, bitmap, offsets + BITMAP_NBYTES, ends, start)

    def _read_list(self, z: Tensor, blocks: Tensor, start: int) -> None:
        offsets, nbytes = self._offsets[blocks], self._nbytes[blocks]
        self._require(nbytes >= 1)
        counts = self._codes[offsets] if self._is_good else offsets
        self._require(nbytes >= 1 + counts)
        if not self._is_good:
            return
        rows, places = _ragged(counts)
        at = self._codes[offsets[rows] + 1 + places]
        is_next = rows[1:] == rows[:-1]
        self._require((at[1:] > at[:-1]) | ~is_next)
        bitmap = torch.zeros(len(blocks), BLOCK_NUMEL, dtype=torch.int64, device=z.device)
        bitmap[rows, at] = 1
        self._place(z, blocks, bitmap, offsets + 1 + counts, offsets + nbytes, start)

    def _place(
        self, z: Tensor, blocks: Tensor, bitmap: Tensor, offsets: Tensor, ends: Tensor, start: int
    ) -> None:
        """Read the levels of what ``bitmap``, [blocks, 256], has set."""
        counts = bitmap.sum(1)
        self._require(counts > 0)
        values = self._read_levels(offsets, ends, counts, 2 << start)
        if values is not None:
            rows, at = torch.nonzero(bitmap, as_tuple=True)
            z[blocks[rows], at] = values + 1

    def _read_levels(
        self, offsets: Tensor, ends: Tensor, counts: Tensor, width: int
    ) -> Tensor | None:
        """Return the integers of a ragged list with levels at bytes ``offsets`` to ``ends``."""
        q = _level_nbytes(counts, width)
        self._require(offsets + q <= ends)
        if not self._is_good:
            return None
        rows, places = _ragged(counts)
        values = torch.zeros_like(rows)
        for byte, shift, low in _code_places(places, q[rows], width):
            part = self._codes[offsets[rows] + byte] >> shift
            values += (part & min((1 << width) - 1, 0xFF)) << low
        largest, offsets = (1 << width) - 1, offsets + q
        is_longer = values == largest
        counts = torch.bincount(rows[is_longer], minlength=len(offsets))
        if width == 8 * self._itemsize:
            counts = torch.zeros_like(counts)
        is_last = counts == 0
        self._require(offsets[is_last] == ends[is_last])
        others = torch.nonzero(~is_last)[:, 0]
        if len(others):
            more = self._read_levels(offsets[others], ends[others], counts[others], 2 * width)
            if more is None:
                return None
            values[is_longer] += more
        return values
