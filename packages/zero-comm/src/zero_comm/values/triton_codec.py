"""Codec of Triton kernels for CUDA, ROCm and XPU, or Triton's interpreter on a CPU.

It gives the bytes and values of `zero_comm.values.torch_codec`; `triton_blocks` has the kernels.
Encoding never waits for the device. Decoding waits once, to return whether the bytes are good.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from zero_comm.differences.difference_format import descriptors_nbytes
from zero_comm.differences.triton_codec import TILE_BLOCKS, block_ends, integers_of, launch_tiles
from zero_comm.values.triton_blocks import choose_kernel, decode_kernel, encode_kernel


class TritonCodec:
    """Launches the kernels on the tensors' device and its current stream."""

    name = "triton"

    def encode(self, values: Tensor, out: Tensor) -> Tensor:
        numel, start = values.numel(), descriptors_nbytes(values.numel())
        if not numel:
            return torch.zeros((), dtype=torch.int64, device=out.device)
        descriptors, codes = out[:start].view(torch.int16), out[start:]
        integers, constants = integers_of(values), constants_of(values.element_size())
        launch_tiles(choose_kernel, values, (integers, descriptors, numel), constants)
        ends = block_ends(descriptors)
        arguments = integers, descriptors, ends, codes, numel
        launch_tiles(encode_kernel, values, arguments, constants)
        return ends[-1] + start

    def decode(self, buffer: Tensor, values: Tensor) -> bool:
        numel, start = values.numel(), descriptors_nbytes(values.numel())
        if buffer.numel() < start or not numel:
            return buffer.numel() == start
        descriptors, codes = buffer[:start].view(torch.int16), buffer[start:]
        is_bad = torch.zeros((), dtype=torch.int32, device=values.device)
        places = descriptors, block_ends(descriptors), codes
        arguments = *places, integers_of(values), is_bad, numel, codes.numel()
        launch_tiles(decode_kernel, values, arguments, constants_of(values.element_size()))
        return not int(is_bad)


def constants_of(itemsize: int) -> dict[str, Any]:
    """Return the constants of all kernels for elements of ``itemsize`` bytes, and the warps."""
    return {"BITS": 8 * itemsize, "BLOCKS": TILE_BLOCKS, "num_warps": 4}


CODEC: Final = TritonCodec()
