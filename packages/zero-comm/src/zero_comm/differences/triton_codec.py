"""Codec of Triton kernels for CUDA, ROCm and XPU, or Triton's interpreter on a CPU.

It gives the bytes and values of `zero_comm.differences.torch_codec`; `triton_blocks` has the
kernels. Neither encoding nor decoding waits for the device.
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

TILE_BLOCKS: Final = 8
"""Blocks of a tile: 16 elements per thread."""
_INTEGERS: Final = {2: torch.int16, 4: torch.int32}


class TritonCodec:
    """Launches the kernels on the tensors' device and its current stream."""

    name = "triton"

    def encode(
        self, old: Tensor, new: Tensor, out: Tensor, *, num_threads: int | None = None
    ) -> Tensor:
        kernels = choose_kernel, encode_kernel
        return encode_tiles(kernels, (old, new), out, constants_of(old.element_size()))

    def decode(self, buffer: Tensor, values: Tensor) -> Tensor:
        return decode_tiles(decode_kernel, buffer, values, constants_of(values.element_size()))


def constants_of(itemsize: int) -> dict[str, Any]:
    """Return the constants of all kernels for elements of ``itemsize`` bytes, and the warps."""
    return {
        "BITS": 8 * itemsize,
        "NUM_STARTS": num_starts(itemsize),
        "BLOCKS": TILE_BLOCKS,
        "num_warps": 4,
    }


def encode_tiles(
    kernels: tuple[Any, Any], operands: tuple[Tensor, ...], out: Tensor, constants: dict[str, Any]
) -> Tensor:
    """Choose each block's mode, then write the blocks. Returns the bytes, on the device.

    ``kernels`` are the one that stores descriptors, and the one that writes codes.
    """
    choose, encode = kernels
    numel, start = operands[0].numel(), descriptors_nbytes(operands[0].numel())
    if not numel:
        return torch.zeros((), dtype=torch.int64, device=out.device)
    descriptors, codes = out[:start].view(torch.int16), out[start:]
    given = tuple(map(_integers_of, operands))
    _launch_tiles(choose, operands[0], (*given, descriptors, numel), constants)
    ends = _block_ends(descriptors)
    _launch_tiles(encode, operands[0], (*given, descriptors, ends, codes, numel), constants)
    return ends[-1] + start


def decode_tiles(kernel: Any, buffer: Tensor, values: Tensor, constants: dict[str, Any]) -> Tensor:
    """Change ``values`` by the blocks of ``buffer``. Returns whether all are good."""
    numel, start = values.numel(), descriptors_nbytes(values.numel())
    if buffer.numel() < start or not numel:
        return torch.tensor(buffer.numel() == start, device=values.device)
    descriptors, codes = buffer[:start].view(torch.int16), buffer[start:]
    is_bad = torch.zeros((), dtype=torch.int32, device=values.device)
    places = descriptors, _block_ends(descriptors), codes
    arguments = *places, _integers_of(values), is_bad, numel, codes.numel()
    _launch_tiles(kernel, values, arguments, constants)
    return is_bad == 0


def _launch_tiles(
    kernel: Any, values: Tensor, arguments: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    """Launch a program for each tile of ``values``."""
    num_tiles = triton.cdiv(num_blocks(values.numel()), TILE_BLOCKS)
    with on_device(values.device):
        kernel[(num_tiles,)](*arguments, **constants)


def _integers_of(values: Tensor) -> Tensor:
    """View elements as integers of their size."""
    return values.view(_INTEGERS[values.element_size()])


def _block_ends(descriptors: Tensor) -> Tensor:
    """Return where the bytes of each block end, int64."""
    return (descriptors & ((1 << MODE_SHIFT) - 1)).cumsum(0, dtype=torch.int64)


CODEC: Final = TritonCodec()
