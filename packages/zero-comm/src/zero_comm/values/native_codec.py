"""Codec of compiled kernels for host memory, with torch's thread count.

Instruction sets are those of `zero_comm.quantizer.native_backend`.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from zero_comm import _kernels
from zero_comm.differences.native_codec import decode_by
from zero_comm.quantizer.native_backend import active_isa, on_host


class NativeCodec:
    """Compiled `zero_comm.values.codec.ValueCodec`."""

    name = "native"

    def encode(self, values: Tensor, out: Tensor) -> Tensor:
        length = _kernels.encode_values(
            active_isa(),
            values.element_size(),
            on_host(values).data_ptr(),
            values.numel(),
            on_host(out).data_ptr(),
            torch.get_num_threads(),
        )
        return torch.tensor(length)

    def decode(self, buffer: Tensor, values: Tensor) -> Tensor:
        return decode_by(_kernels.decode_values, buffer, values)


CODEC: Final = NativeCodec()
