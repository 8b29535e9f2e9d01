"""Lossless codec of Triton kernels for CUDA, ROCm and XPU, or for Triton's interpreter on a CPU.

The bytes and values equal those of `zero_comm.lossless.torch_codec`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor

from zero_comm.lossless import triton_differences, triton_values
from zero_comm.lossless.block_frame import NBYTES_MASK, descriptors_nbytes, num_blocks
from zero_comm.lossless.torch_codec import INTEGERS
from zero_comm.quantizer.triton_backend import on_device


class TritonCodec:
    """Codec of differences or values. ``kernels`` run in the tensors' device's current stream."""

    name = "triton"

    def __init__(self, kernels: ModuleType) -> None:
        self._kernels = kernels

    def measure(self, *operands: Tensor) -> Tensor:
        start = descriptors_nbytes(operands[0].numel())
        descriptors = torch.empty(start // 2, dtype=torch.int16, device=operands[0].device)
        return self._choose(operands, descriptors).sum() + start

    def encode(self, *operands: Tensor, out: Tensor, num_threads: int | None = None) -> Tensor:
        numel, start = operands[0].numel(), descriptors_nbytes(operands[0].numel())
        descriptors, codes = out.zero_()[:start].view(torch.int16), out[start:]
        nbytes = self._choose(operands, descriptors)
        given, ends = map(_integers, operands), nbytes.cumsum(0)
        _launch(self._kernels.encode_kernel, operands[0], *given, descriptors, ends, codes, numel)
        return nbytes.sum() + start

    def decode(self, buffer: Tensor, values: Tensor) -> Tensor:
        numel, start = values.numel(), descriptors_nbytes(values.numel())
        if buffer.numel() < start:
            return torch.full((), -1, dtype=torch.int64, device=values.device)
        descriptors, codes = buffer[:start].view(torch.int16), buffer[start:]
        is_bad = torch.zeros((), dtype=torch.int32, device=values.device)
        nbytes = _nbytes_of(descriptors)
        places, sizes = (descriptors, nbytes.cumsum(0), codes), (numel, codes.numel())
        _launch(self._kernels.decode_kernel, values, *places, _integers(values), is_bad, *sizes)
        return torch.where(is_bad == 0, nbytes.sum() + start, -1)

    def _choose(self, operands: tuple[Tensor, ...], descriptors: Tensor) -> Tensor:
        """Fill ``descriptors``, and return the size of each block in bytes."""
        given, numel = map(_integers, operands), operands[0].numel()
        _launch(self._kernels.choose_kernel, operands[0], *given, descriptors, numel)
        return _nbytes_of(descriptors)


def constants_of(itemsize: int) -> dict[str, Any]:
    """Return the compile-time arguments of all kernels for elements of ``itemsize`` bytes."""
    return {"BITS": 8 * itemsize, "num_warps": 1}


def _launch(kernel: Any, elements: Tensor, *arguments: Any) -> None:
    if blocks := num_blocks(elements.numel()):
        with on_device(elements.device):
            kernel[(blocks,)](*arguments, **constants_of(elements.element_size()))


def _integers(x: Tensor) -> Tensor:
    return x.view(INTEGERS[x.element_size()])


def _nbytes_of(descriptors: Tensor) -> Tensor:
    """Return the size of each block's codes in bytes, int64."""
    return (descriptors & NBYTES_MASK).long()


CODECS: Final = {
    "differences": TritonCodec(triton_differences),
    "values": TritonCodec(triton_values),
}
