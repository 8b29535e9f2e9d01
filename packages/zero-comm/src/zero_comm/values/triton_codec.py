"""Codec of Triton kernels for CUDA, ROCm and XPU, or Triton's interpreter on a CPU.

It gives the bytes and values of `zero_comm.values.torch_codec`; `triton_blocks` has the kernels.
Neither encoding nor decoding waits for the device.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from zero_comm.differences.triton_codec import TILE_BLOCKS, decode_tiles, encode_tiles
from zero_comm.values.triton_blocks import choose_kernel, decode_kernel, encode_kernel


class TritonCodec:
    """Launches the kernels on the tensors' device and its current stream."""

    name = "triton"

    def encode(self, values: Tensor, out: Tensor) -> Tensor:
        kernels = choose_kernel, encode_kernel
        return encode_tiles(kernels, (values,), out, constants_of(values.element_size()))

    def decode(self, buffer: Tensor, values: Tensor) -> Tensor:
        return decode_tiles(decode_kernel, buffer, values, constants_of(values.element_size()))


def constants_of(itemsize: int) -> dict[str, Any]:
    """Return the constants of all kernels for elements of ``itemsize`` bytes, and the warps."""
    return {"BITS": 8 * itemsize, "BLOCKS": TILE_BLOCKS, "num_warps": 4}


CODEC: Final = TritonCodec()
