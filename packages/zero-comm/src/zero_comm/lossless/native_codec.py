"""Lossless codec of compiled kernels for host memory, with torch's thread count.

`zero_comm.quantizer.native_backend` selects the instruction set, at best AVX-512 VBMI2.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from zero_comm import _kernels
from zero_comm.quantizer.native_backend import active_isa, on_host


class NativeCodec:
    """Compiled `zero_comm.lossless.codec.Codec`."""

    name = "native"

    def __init__(self, number: int) -> None:
        self._coding = number

    def encode(self, *operands: Tensor, out: Tensor, num_threads: int | None = None) -> Tensor:
        length = _kernels.encode_blocks(
            active_isa(),
            self._coding,
            operands[0].element_size(),
            on_host(operands[0]).data_ptr(),
            on_host(operands[-1]).data_ptr(),
            operands[0].numel(),
            on_host(out).data_ptr(),
            num_threads or torch.get_num_threads(),
        )
        return torch.tensor(length)

    def decode(self, buffer: Tensor, values: Tensor) -> Tensor:
        is_good = _kernels.decode_blocks(
            active_isa(),
            self._coding,
            values.element_size(),
            on_host(buffer).data_ptr(),
            buffer.numel(),
            on_host(values).data_ptr(),
            values.numel(),
            torch.get_num_threads(),
        )
        return torch.tensor(buffer.numel() if is_good else -1)


# The numbers are those of the enumeration in native/kernels.h.
CODECS: Final = {"differences": NativeCodec(0), "values": NativeCodec(1)}
