"""Lossless codec of Triton kernels for CUDA, ROCm and XPU, or for Triton's interpreter on a CPU.

The bytes and values equal those of `zero_comm.lossless.torch_codec`. Neither encoding nor decoding
waits for the device.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from zero_comm.lossless import triton_differences, triton_values
from zero_comm.lossless.block_frame import MODE_SHIFT, descriptors_nbytes, num_blocks
from zero_comm.lossless.torch_codec import INTEGERS
from zero_comm.quantizer.triton_backend import on_device


class TritonCodec:
    """Codec of one coding, whose kernels run on the tensors' device and its current stream."""

    name = "triton"

    def __init__(self, kernels: ModuleType) -> None:
        self._kernels = kernels

    def encode(self, *operands: Tensor, out: Tensor, num_threads: int | None = None) -> Tensor:
        numel, start = operands[0].numel(), descriptors_nbytes(operands[0].numel())
        if not numel:
            return torch.zeros((), dtype=torch.int64, device=out.device)
        descriptors, codes = out[:start].view(torch.int16), out[start:]
        given = [x.view(INTEGERS[x.element_size()]) for x in operands]
        _launch(self._kernels.choose_kernel, given[0], *given, descriptors, numel)
        ends = _block_ends(descriptors)
        _launch(self._kernels.encode_kernel, given[0], *given, descriptors, ends, codes, numel)
        return ends[-1] + start

    def decode(self, buffer: Tensor, values: Tensor) -> Tensor:
        numel, start = values.numel(), descriptors_nbytes(values.numel())
        if buffer.numel() < start or not numel:
            return torch.tensor(buffer.numel() == start, device=values.device)
        descriptors, codes = buffer[:start].view(torch.int16), buffer[start:]
        is_bad = torch.zeros((), dtype=torch.int32, device=values.device)
        elements = values.view(INTEGERS[values.element_size()])
        places = descriptors, _block_ends(descriptors), codes
        sizes = numel, codes.numel()
        _launch(self._kernels.decode_kernel, elements, *places, elements, is_bad, *sizes)
        return is_bad == 0


def constants_of(itemsize: int) -> dict[str, Any]:
    """Return the compile-time arguments of all kernels for elements of ``itemsize`` bytes."""
    return {"BITS": 8 * itemsize, "num_warps": 1}


def _launch(kernel: Any, elements: Tensor, *arguments: Any) -> None:
    with on_device(elements.device):
        kernel[(num_blocks(elements.numel()),)](*arguments, **constants_of(elements.element_size()))


def _block_ends(descriptors: Tensor) -> Tensor:
    """Return the offset in the codes at which the bytes of each block end, int64."""
    return (descriptors & ((1 << MODE_SHIFT) - 1)).cumsum(0, dtype=torch.int64)


CODECS: Final = {
    "differences": TritonCodec(triton_differences),
    "values": TritonCodec(triton_values),
}
