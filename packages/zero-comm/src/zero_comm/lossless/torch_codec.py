"""The block frame in plain torch operations, on every device: the definition of others' results.

See [Note: the block frame] in `zero_comm.lossless.block_frame`. The codings are in
`torch_differences` and `torch_values`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from zero_comm.lossless.block_frame import (
    BLOCK_NUMEL,
    EMPTY,
    MODE_SHIFT,
    RAW,
    descriptors_nbytes,
    num_blocks,
)

_CHUNK_BLOCKS: Final = 4096  # bounds the workspace: integers of 64 bits
IMPOSSIBLE: Final = 1 << 20  # bytes
_NBYTES_MASK: Final = (1 << MODE_SHIFT) - 1
INTEGERS: Final = {2: torch.int16, 4: torch.int32}


class NotBlocksError(ValueError):
    """Bytes are not those of blocks."""


def require(holds: Tensor) -> None:
    """Raise `NotBlocksError` unless all of ``holds`` are true."""
    if not bool(holds.all()):
        raise NotBlocksError


@dataclass(frozen=True, slots=True)
class Blocks:
    """Mode, bytes, begin in the codes, and elements of some blocks: int64, a number per block."""

    mode: Tensor
    nbytes: Tensor
    offsets: Tensor
    present: Tensor
    itemsize: int


class TorchCodec(ABC):
    """`zero_comm.lossless.codec.Codec` in torch operations.

    Bits of elements are int64, [blocks, 256], and not negative. Codes are int64, a byte each.
    """

    name = "torch"

    @abstractmethod
    def _measure(
        self, bits: list[Tensor], present: Tensor, itemsize: int
    ) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """Return what is coded, whether each block is empty, and its bytes in every further mode.

        A mode that a block cannot have takes ``IMPOSSIBLE`` bytes.
        """

    @abstractmethod
    def _write(self, out: Tensor, coded: Tensor, blocks: Blocks) -> None:
        """Write the blocks of further modes into ``out``, which holds zeros there."""

    @abstractmethod
    def _read(self, codes: Tensor, bits: Tensor, blocks: Blocks) -> Tensor:
        """Return the new bits of all but raw blocks. ``bits`` are the old ones."""

    def encode(self, *operands: Tensor, out: Tensor, num_threads: int | None = None) -> Tensor:
        numel, end = operands[0].numel(), descriptors_nbytes(operands[0].numel())
        descriptors = out[:end].view(torch.int16)
        for first in range(0, num_blocks(numel), _CHUNK_BLOCKS):
            chunk = slice(first * BLOCK_NUMEL, (first + _CHUNK_BLOCKS) * BLOCK_NUMEL)
            found, codes = self._encode_chunk([operand[chunk] for operand in operands])
            descriptors[first : first + _CHUNK_BLOCKS] = found
            out[end : end + codes.numel()] = codes
            end += codes.numel()
        return torch.tensor(end, device=out.device)

    def _encode_chunk(self, operands: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the descriptors (int16) and the codes (uint8) of some blocks."""
        new, numel, itemsize = operands[-1], operands[-1].numel(), operands[-1].element_size()
        bits = [_bits(x) for x in operands]
        present = _present_in(len(bits[0]), new)
        coded, is_empty, candidates = self._measure(bits, present, itemsize)
        # The mode in the lowest bits: of the fewest bytes the lowest.
        best = present * itemsize * 16 + RAW
        for further_mode, found in candidates.items():
            best = torch.minimum(best, found * 16 + further_mode)
        best = torch.where(is_empty, EMPTY, best)
        mode, nbytes = best % 16, best // 16
        offsets = nbytes.cumsum(0) - nbytes
        out = torch.zeros(int(nbytes.sum()), dtype=torch.int64, device=new.device)
        raw = torch.nonzero(mode == RAW)[:, 0]
        padded = torch.nn.functional.pad(
            new.view(torch.uint8), (0, -numel % BLOCK_NUMEL * itemsize)
        )
        rows, places = ragged(nbytes[raw])
        out[offsets[raw][rows] + places] = padded.view(len(mode), -1)[raw[rows], places].long()
        self._write(out, coded, Blocks(mode, nbytes, offsets, present, itemsize))
        descriptors = mode * (1 << MODE_SHIFT) + nbytes
        return descriptors.to(torch.int32).to(torch.int16), out.to(torch.uint8)

    def decode(self, buffer: Tensor, values: Tensor) -> Tensor:
        try:
            self._decode(buffer, values)
        except NotBlocksError:
            return torch.tensor(False, device=values.device)
        return torch.tensor(True, device=values.device)

    def _decode(self, buffer: Tensor, values: Tensor) -> None:
        start = descriptors_nbytes(values.numel())
        if buffer.numel() < start:
            raise NotBlocksError
        descriptors = buffer[:start].view(torch.int16).to(torch.int64) & 0xFFFF
        codes, nbytes = buffer[start:], descriptors & _NBYTES_MASK
        if int(nbytes.sum()) != codes.numel():
            raise NotBlocksError
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
        itemsize, codes = values.element_size(), codes.to(torch.int64)
        mode, nbytes = descriptors >> MODE_SHIFT, descriptors & _NBYTES_MASK
        present = _present_in(len(mode), values)
        require((mode != EMPTY) | (nbytes == 0))
        require((mode != RAW) | (nbytes == present * itemsize))
        blocks = Blocks(mode, nbytes, offsets, present, itemsize)
        new = self._read(codes, _bits(values), blocks)
        new = new.flatten()[: values.numel()]
        # Through 64 bits: a narrower integer would refuse the upper half of the patterns.
        signed = new - ((new >> (8 * itemsize - 1)) << 8 * itemsize)
        values.view(INTEGERS[itemsize]).copy_(signed)
        raw = torch.nonzero(mode == RAW)[:, 0]
        rows, places = ragged(nbytes[raw])
        taken = codes[offsets[raw][rows] + places].to(torch.uint8)
        values.view(torch.uint8)[raw[rows] * BLOCK_NUMEL * itemsize + places] = taken


def _bits(values: Tensor) -> Tensor:
    """Return the bits of elements, zeros for absent ones of the last block."""
    itemsize = values.element_size()
    bits = values.view(INTEGERS[itemsize]).to(torch.int64) & ((1 << 8 * itemsize) - 1)
    return torch.nn.functional.pad(bits, (0, -len(bits) % BLOCK_NUMEL)).view(-1, BLOCK_NUMEL)


def _present_in(num: int, values: Tensor) -> Tensor:
    """Return how many elements of each block there are."""
    first = torch.arange(num, device=values.device) * BLOCK_NUMEL
    return (values.numel() - first).clamp(max=BLOCK_NUMEL)


def ragged(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row of each element of a ragged list, and its number within the row."""
    index = torch.arange(len(counts), device=counts.device)
    rows = index.repeat_interleave(counts)
    starts = counts.cumsum(0) - counts
    return rows, torch.arange(len(rows), device=counts.device) - starts[rows]
