"""Coded values in plain torch operations, on every device: the definition of the others' results.

See [Note: the value buffer] in `zero_comm.values.value_format`.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from zero_comm.differences.difference_format import BLOCK_NUMEL, MODE_SHIFT
from zero_comm.differences.torch_codec import decode_chunks, encode_chunks
from zero_comm.values.value_format import CODED, MAX_WIDTH, PLANE_NBYTES, RAW, ZERO, fixed_nbytes

_INTEGERS: Final = {2: torch.int16, 4: torch.int32}
_SIZE_MASK: Final = (1 << MODE_SHIFT) - 1


class TorchCodec:
    """`zero_comm.values.codec.ValueCodec` in torch operations."""

    name = "torch"

    def encode(self, values: Tensor, out: Tensor) -> Tensor:
        return encode_chunks(_encode, (values,), out)

    def decode(self, buffer: Tensor, values: Tensor) -> Tensor:
        return torch.tensor(decode_chunks(_decode, buffer, values), device=values.device)


def _bytes_of(values: Tensor) -> Tensor:
    """Return the rotated bytes of each block, [blocks, itemsize, 256], the lowest first: int64."""
    itemsize = values.element_size()
    bits = values.view(_INTEGERS[itemsize]).to(torch.int64) & ((1 << 8 * itemsize) - 1)
    bits = torch.nn.functional.pad(bits, (0, -len(bits) % BLOCK_NUMEL)).view(-1, 1, BLOCK_NUMEL)
    rotated = (bits << 1) | (bits >> (8 * itemsize - 1))
    shifts = 8 * torch.arange(itemsize, device=values.device)[:, None]
    return (rotated >> shifts) & 0xFF


def _places(offsets: Tensor, nbytes: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """Return the addresses of bytes of some blocks, [blocks, room], and whether they are there."""
    place = torch.arange(room, device=offsets.device)
    return offsets[:, None] + place, place < nbytes[:, None]


def _encode(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the descriptors (int16) and the codes (uint8) of some blocks."""
    numel, itemsize, device = values.numel(), values.element_size(), values.device
    rotated = _bytes_of(values)
    tops = rotated[:, -1]
    base = tops.amax(1, keepdim=True)
    codes = base - tops
    blocks = len(codes)
    present = (numel - torch.arange(blocks, device=device) * BLOCK_NUMEL).clamp(max=BLOCK_NUMEL)

    # By bytes, and then by mode: the lowest of the fewest bytes.
    best = present * itemsize * 16 + RAW
    is_whole = present == BLOCK_NUMEL
    for width in range(MAX_WIDTH + 1):
        escaped = (codes >= (1 << width) - 1).sum(1) if width else 0
        allowed = is_whole & (codes.amax(1) == 0) if width == 0 else is_whole
        found = (fixed_nbytes(width, itemsize) + escaped) * 16 + CODED + width
        best = torch.where(allowed & (found < best), found, best)
    mode, nbytes = best % 16, best // 16
    is_zero = (rotated == 0).flatten(1).all(1)
    mode = torch.where(is_zero, ZERO, mode)
    nbytes = torch.where(is_zero, 0, nbytes)
    offsets = nbytes.cumsum(0) - nbytes
    out = torch.zeros(int(nbytes.sum()), dtype=torch.uint8, device=device)

    rows = torch.nonzero(mode == RAW)[:, 0]
    padded = torch.nn.functional.pad(
        values.view(torch.uint8), (0, (blocks * BLOCK_NUMEL - numel) * itemsize)
    )
    places, is_there = _places(offsets[rows], nbytes[rows], BLOCK_NUMEL * itemsize)
    out[places[is_there]] = padded.view(blocks, -1)[rows][is_there]
    for width in range(MAX_WIDTH + 1):
        rows = torch.nonzero(mode == CODED + width)[:, 0]
        if not len(rows):
            continue
        largest = (1 << width) - 1
        own = codes[rows].clamp(max=largest)
        planes = (own[:, None] >> torch.arange(width, device=device)[:, None]) & 1
        packed = planes.view(len(rows), -1, 8) << torch.arange(8, device=device)
        fixed = torch.cat([base[rows], rotated[rows, :-1].flatten(1), packed.sum(2)], 1)
        at = offsets[rows, None]
        out[at + torch.arange(fixed.shape[1], device=device)] = fixed.to(torch.uint8)
        if width:
            is_escape = own == largest
            target = at + fixed.shape[1] + is_escape.cumsum(1) - 1
            out[target[is_escape]] = tops[rows][is_escape].to(torch.uint8)
    descriptors = mode * (1 << MODE_SHIFT) + nbytes
    return descriptors.to(torch.int32).to(torch.int16), out


def _decode(codes: Tensor, descriptors: Tensor, offsets: Tensor, values: Tensor) -> bool:
    """Fill ``values`` from some blocks. Returns whether their bytes are those of blocks."""
    numel, itemsize, device = values.numel(), values.element_size(), values.device
    blocks = len(descriptors)
    mode, nbytes = descriptors >> MODE_SHIFT, descriptors & _SIZE_MASK
    present = (numel - torch.arange(blocks, device=device) * BLOCK_NUMEL).clamp(max=BLOCK_NUMEL)
    width = mode - CODED
    escapes = nbytes - fixed_nbytes(0, itemsize) - width * PLANE_NBYTES
    is_coded = (width >= 0) & (width <= MAX_WIDTH) & (present == BLOCK_NUMEL) & (escapes >= 0)
    is_good = torch.where(mode == ZERO, nbytes == 0, is_coded)
    is_good = torch.where(mode == RAW, nbytes == present * itemsize, is_good)
    if not bool(is_good.all()):
        return False
    filled = torch.zeros(blocks, BLOCK_NUMEL, dtype=torch.int64, device=device)
    raw = torch.zeros(blocks, BLOCK_NUMEL * itemsize, dtype=torch.uint8, device=device)
    rows = torch.nonzero(mode == RAW)[:, 0]
    places, is_there = _places(offsets[rows], nbytes[rows], BLOCK_NUMEL * itemsize)
    taken = torch.zeros_like(raw[rows])
    taken[is_there] = codes[places[is_there]]
    raw[rows] = taken
    for number in range(MAX_WIDTH + 1):
        rows = torch.nonzero(mode == CODED + number)[:, 0]
        if not len(rows):
            continue
        at, low_nbytes = offsets[rows, None], (itemsize - 1) * BLOCK_NUMEL
        size = fixed_nbytes(number, itemsize)
        own = codes[at + torch.arange(size, device=device)].to(torch.int64)
        base = own[:, :1]
        low = own[:, 1 : 1 + low_nbytes].view(len(rows), itemsize - 1, BLOCK_NUMEL)
        planes = own[:, 1 + low_nbytes :].view(len(rows), number, PLANE_NBYTES, 1)
        bits = ((planes >> torch.arange(8, device=device)) & 1).flatten(2)
        less = (bits << torch.arange(number, device=device)[:, None]).sum(1)
        tops = (base - less) & 0xFF
        is_escape = (
            less == (1 << number) - 1 if number else torch.zeros_like(less, dtype=torch.bool)
        )
        if not bool((is_escape.sum(1) == escapes[rows]).all()):
            return False
        target = (at + size + is_escape.cumsum(1) - 1)[is_escape]
        tops[is_escape] = codes[target].to(torch.int64)
        rotated = tops << 8 * (itemsize - 1)
        for k in range(itemsize - 1):
            rotated |= low[:, k] << 8 * k
        filled[rows] = (rotated >> 1) | ((rotated & 1) << (8 * itemsize - 1))
    # Through 64 bits: a narrower integer would refuse the upper half of the patterns.
    signed = filled - ((filled >> (8 * itemsize - 1)) << 8 * itemsize)
    integers = _INTEGERS[itemsize]
    of_raw = raw.view(integers).view(blocks, BLOCK_NUMEL).to(torch.int64)
    signed = torch.where((mode == RAW)[:, None], of_raw, signed)
    values.view(integers).copy_(signed.flatten()[:numel])
    return True
