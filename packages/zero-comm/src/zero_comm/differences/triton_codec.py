"""Codec of Triton kernels for CUDA, ROCm and XPU, or Triton's interpreter on a CPU.

It gives the bytes and values of `zero_comm.differences.torch_codec`; `triton_blocks` has the
kernels. Encoding never waits for the device. Decoding waits once, to return whether the bytes are
good.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
from torch import Tensor

from zero_comm.differences.difference_format import (
    MODE_SHIFT,
    descriptors_nbytes,
    num_blocks,
    num_starts,
)
from zero_comm.differences.triton_blocks import choose_kernel, decode_kernel, encode_kernel
from zero_comm.quantizer.triton_backend import on_device

_TILE_BLOCKS: Final = 8  # 16 elements per thread
_INTEGERS: Final = {2: torch.int16, 4: torch.int32}


class TritonCodec:
    """Launches the kernels on the tensors' device and its current stream."""

    name = "triton"

    def encode(self, old: Tensor, new: Tensor, out: Tensor) -> Tensor:
        numel, start = old.numel(), descriptors_nbytes(old.numel())
        if not numel:
            return torch.zeros((), dtype=torch.int64, device=out.device)
        descriptors, codes = out[:start].view(torch.int16), out[start:]
        both = _integers(old), _integers(new)
        _launch(choose_kernel, old, (*both, descriptors, numel))
        ends = _ends(descriptors)
        _launch(encode_kernel, old, (*both, descriptors, ends, codes, numel))
        return ends[-1] + start

    def decode(self, buffer: Tensor, values: Tensor) -> bool:
        numel, start = values.numel(), descriptors_nbytes(values.numel())
        if buffer.numel() < start or not numel:
            return buffer.numel() == start
        descriptors, codes = buffer[:start].view(torch.int16), buffer[start:]
        is_bad = torch.zeros((), dtype=torch.int32, device=values.device)
        places = descriptors, _ends(descriptors), codes
        _launch(decode_kernel, values, (*places, _integers(values), is_bad, numel, codes.numel()))
        return not int(is_bad)


def constants_of(itemsize: int) -> dict[str, Any]:
    """Return the constants of all kernels for elements of ``itemsize`` bytes, and the warps."""
    return {
        "BITS": 8 * itemsize,
        "NUM_STARTS": num_starts(itemsize),
        "BLOCKS": _TILE_BLOCKS,
        "num_warps": 4,
    }


def _launch(kernel: Any, values: Tensor, arguments: tuple[Any, ...]) -> None:
    """Launch a program for each tile of ``values``."""
    num_tiles = triton.cdiv(num_blocks(values.numel()), _TILE_BLOCKS)
    with on_device(values.device):
        kernel[(num_tiles,)](*arguments, **constants_of(values.element_size()))


def _integers(values: Tensor) -> Tensor:
    return values.view(_INTEGERS[values.element_size()])


def _ends(descriptors: Tensor) -> Tensor:
    """Return where the bytes of each block end, int64."""
    return (descriptors & ((1 << MODE_SHIFT) - 1)).cumsum(0, dtype=torch.int64)


CODEC: Final = TritonCodec()
