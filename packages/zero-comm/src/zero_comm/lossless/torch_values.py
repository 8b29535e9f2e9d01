"""Coded values in plain torch operations: the definition of the other backends' results.

See [Note: the value buffer] in `zero_comm.lossless.value_format`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero_comm.lossless.block_frame import BLOCK_NUMEL, EMPTY, RAW
from zero_comm.lossless.torch_codec import IMPOSSIBLE, Blocks, TorchCodec, require
from zero_comm.lossless.value_format import CODED, MAX_WIDTH, PLANE_NBYTES, fixed_nbytes


class TorchValues(TorchCodec):
    """Codes the rotated bits, split into bytes: [blocks, itemsize, 256]."""

    def _measure(
        self, bits: list[Tensor], present: Tensor, itemsize: int
    ) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        (values,) = bits
        rotated = (values << 1) | (values >> (8 * itemsize - 1))
        shifts = 8 * torch.arange(itemsize, device=values.device)[:, None]
        coded = (rotated[:, None] >> shifts) & 0xFF
        codes = coded[:, -1].amax(1, keepdim=True) - coded[:, -1]
        is_whole, candidates = present == BLOCK_NUMEL, {}
        for width in range(MAX_WIDTH + 1):
            escaped = (codes >= (1 << width) - 1).sum(1) if width else torch.zeros_like(present)
            is_allowed = is_whole if width else is_whole & (codes.amax(1) == 0)
            nbytes = fixed_nbytes(width, itemsize) + escaped
            candidates[CODED + width] = torch.where(is_allowed, nbytes, IMPOSSIBLE)
        return coded, (values == 0).all(1), candidates

    def _write(self, out: Tensor, coded: Tensor, blocks: Blocks) -> None:
        for width in range(MAX_WIDTH + 1):
            rows = torch.nonzero(blocks.mode == CODED + width)[:, 0]
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

    def _read(self, codes: Tensor, bits: Tensor, blocks: Blocks) -> Tensor:
        itemsize, width = blocks.itemsize, blocks.mode - CODED
        escapes = blocks.nbytes - fixed_nbytes(0, itemsize) - width * PLANE_NBYTES
        is_coded = (width >= 0) & (width <= MAX_WIDTH) & (blocks.present == BLOCK_NUMEL)
        require((blocks.mode == EMPTY) | (blocks.mode == RAW) | (is_coded & (escapes >= 0)))
        filled = torch.zeros_like(bits)
        for number in range(MAX_WIDTH + 1):
            rows = torch.nonzero(width == number)[:, 0]
            if not len(rows):
                continue
            at, low_nbytes = blocks.offsets[rows, None], (itemsize - 1) * BLOCK_NUMEL
            size = fixed_nbytes(number, itemsize)
            own = codes[at + torch.arange(size, device=bits.device)]
            low = own[:, 1 : 1 + low_nbytes].view(len(rows), itemsize - 1, BLOCK_NUMEL)
            planes = own[:, 1 + low_nbytes :].view(len(rows), number, PLANE_NBYTES, 1)
            each = ((planes >> torch.arange(8, device=bits.device)) & 1).flatten(2)
            less = (each << torch.arange(number, device=bits.device)[:, None]).sum(1)
            tops = (own[:, :1] - less) & 0xFF
            is_escape = less == (1 << number) - 1 if number else torch.zeros_like(less).bool()
            require(is_escape.sum(1) == escapes[rows])
            tops[is_escape] = codes[(at + size + is_escape.cumsum(1) - 1)[is_escape]]
            rotated = tops << 8 * (itemsize - 1)
            for k in range(itemsize - 1):
                rotated |= low[:, k] << 8 * k
            filled[rows] = (rotated >> 1) | ((rotated & 1) << (8 * itemsize - 1))
        return filled
