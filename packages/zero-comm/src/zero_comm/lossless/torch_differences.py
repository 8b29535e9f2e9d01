"""Differences in plain torch operations: the definition of the other backends' results.

See [Note: the difference buffer] in `zero_comm.lossless.difference_format`. A **ragged** list has
n[r] integers for row r, one row after another; ``rows`` names the row of each.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zero_comm.lossless.block_frame import BLOCK_NUMEL, EMPTY, RAW
from zero_comm.lossless.difference_format import BITMAP, BITMAP_NBYTES, DENSE, LIST, num_starts
from zero_comm.lossless.torch_codec import IMPOSSIBLE, Blocks, TorchCodec, ragged, require


class TorchDifferences(TorchCodec):
    """Codes ``z`` of the elements."""

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
        for start in range(num_starts(itemsize)):
            width = 2 << start
            of_changed = _levels_nbytes(z - 1, changed, width, num_bits)
            listed = torch.where(changed < BLOCK_NUMEL, 1 + changed + of_changed, IMPOSSIBLE)
            candidates[LIST + start] = listed
            candidates[BITMAP + start] = BITMAP_NBYTES + of_changed
            candidates[DENSE + start] = _levels_nbytes(z, whole, width, num_bits)
        return z, changed == 0, candidates

    def _write(self, out: Tensor, coded: Tensor, blocks: Blocks) -> None:
        for start in range(num_starts(blocks.itemsize)):
            of_mode = torch.nonzero(blocks.mode == DENSE + start)[:, 0]
            rows = torch.arange(len(of_mode), device=out.device).repeat_interleave(BLOCK_NUMEL)
            offsets, values = blocks.offsets[of_mode], coded[of_mode].flatten()
            _write_levels(out, offsets, rows, values, start, blocks.itemsize)
            of_mode = torch.nonzero(blocks.mode == BITMAP + start)[:, 0]
            offsets, (rows, at, values) = blocks.offsets[of_mode], _changed(coded[of_mode])
            out.index_add_(0, offsets[rows] + at // 8, 1 << at % 8)
            _write_levels(out, offsets + BITMAP_NBYTES, rows, values, start, blocks.itemsize)
            of_mode = torch.nonzero(blocks.mode == LIST + start)[:, 0]
            offsets, (rows, at, values) = blocks.offsets[of_mode], _changed(coded[of_mode])
            counts = torch.bincount(rows, minlength=len(of_mode))
            out[offsets] = counts
            out[offsets[rows] + 1 + ragged(counts)[1]] = at
            _write_levels(out, offsets + 1 + counts, rows, values, start, blocks.itemsize)

    def _read(self, codes: Tensor, bits: Tensor, blocks: Blocks) -> Tensor:
        z = torch.zeros_like(bits)
        known = (blocks.mode == EMPTY) | (blocks.mode == RAW)
        for start in range(num_starts(blocks.itemsize)):
            for layout, read in ((DENSE, _read_dense), (BITMAP, _read_bitmap), (LIST, _read_list)):
                is_here = blocks.mode == layout + start
                known |= is_here
                of_mode = torch.nonzero(is_here)[:, 0]
                if not len(of_mode):
                    continue
                begin = blocks.offsets[of_mode]
                end = begin + blocks.nbytes[of_mode]
                z[of_mode] = read(codes, begin, end, start, blocks.itemsize)
        require(known)
        mask = (1 << 8 * blocks.itemsize) - 1
        z &= mask
        moved = torch.where(z % 2 == 1, -(z + 1) // 2, z // 2)
        return _from_ordered((_ordered(bits, blocks.itemsize) + moved) & mask, blocks.itemsize)


def _ordered(bits: Tensor, itemsize: int) -> Tensor:
    """Return ordered integers. The same maps them back, with the meaning of the top bit turned."""
    top, mask = 1 << (8 * itemsize - 1), (1 << 8 * itemsize) - 1
    return torch.where(bits >= top, mask - bits, bits + top)


def _from_ordered(integers: Tensor, itemsize: int) -> Tensor:
    top, mask = 1 << (8 * itemsize - 1), (1 << 8 * itemsize) - 1
    return torch.where(integers >= top, integers - top, mask - integers)


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


def _changed(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the row, the position and ``z - 1`` of what is not zero, as ragged lists."""
    rows, at = torch.nonzero(z, as_tuple=True)
    return rows, at, z[rows, at] - 1


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
        _, places = ragged(counts)
        for byte, shift, low in _code_places(places, q[rows], width):
            part = (codes >> low) & 0xFF
            out.index_add_(0, offsets[rows] + byte, part << shift)
        if width == 8 * itemsize:
            return
        is_longer = values >= largest
        rows, values = rows[is_longer], values[is_longer] - largest
        offsets, width = offsets + q, 2 * width


def _read_dense(codes: Tensor, begin: Tensor, end: Tensor, start: int, itemsize: int) -> Tensor:
    """Return ``z`` of dense blocks."""
    counts = torch.full_like(begin, BLOCK_NUMEL)
    values = _read_levels(codes, begin, end, counts, 2 << start, itemsize)
    return values.view(-1, BLOCK_NUMEL)


def _read_bitmap(codes: Tensor, begin: Tensor, end: Tensor, start: int, itemsize: int) -> Tensor:
    require(end - begin >= BITMAP_NBYTES)
    at = torch.arange(BLOCK_NUMEL, device=codes.device)
    bitmap = codes[begin[:, None] + at // 8] >> at % 8 & 1
    return _spread(codes, bitmap, begin + BITMAP_NBYTES, end, start, itemsize)


def _read_list(codes: Tensor, begin: Tensor, end: Tensor, start: int, itemsize: int) -> Tensor:
    require(end > begin)
    counts = codes[begin]
    require(end - begin > counts)
    rows, places = ragged(counts)
    at = codes[begin[rows] + 1 + places]
    require((at[1:] > at[:-1]) | (rows[1:] != rows[:-1]))
    bitmap = torch.zeros(len(begin), BLOCK_NUMEL, dtype=torch.int64, device=codes.device)
    bitmap[rows, at] = 1
    return _spread(codes, bitmap, begin + 1 + counts, end, start, itemsize)


def _spread(
    codes: Tensor, bitmap: Tensor, offsets: Tensor, end: Tensor, start: int, itemsize: int
) -> Tensor:
    """Return ``z`` where ``bitmap``, [blocks, 256], is set: one more than the levels there hold."""
    counts = bitmap.sum(1)
    require(counts > 0)
    z = torch.zeros_like(bitmap)
    z[bitmap > 0] = _read_levels(codes, offsets, end, counts, 2 << start, itemsize) + 1
    return z


def _read_levels(
    codes: Tensor, offsets: Tensor, ends: Tensor, counts: Tensor, width: int, itemsize: int
) -> Tensor:
    """Return the integers of a ragged list with levels at bytes ``offsets`` to ``ends``."""
    q = _level_nbytes(counts, width)
    require(offsets + q <= ends)
    rows, places = ragged(counts)
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
    require(offsets[is_last] == ends[is_last])
    others = torch.nonzero(~is_last)[:, 0]
    if len(others):
        rest = offsets[others], ends[others], counts[others]
        values[is_longer] += _read_levels(codes, *rest, 2 * width, itemsize)
    return values
