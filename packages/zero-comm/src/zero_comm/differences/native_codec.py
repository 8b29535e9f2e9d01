"""Codec of compiled kernels for host memory, with torch's thread count.

Instruction sets are those of `zero_comm.quantizer.native_backend`. The fastest keeps and spreads
elements by AVX-512's VBMI2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from zero_comm import _kernels
from zero_comm.quantizer.native_backend import active_isa, on_host


class NativeCodec:
    """Compiled `zero_comm.differences.codec.DifferenceCodec`."""

    name = "native"

    def encode(
        self, old: Tensor, new: Tensor, out: Tensor, *, num_threads: int | None = None
    ) -> Tensor:
        length = _kernels.encode_difference(
            active_isa(),
            old.element_size(),
            on_host(old).data_ptr(),
            on_host(new).data_ptr(),
            old.numel(),
            on_host(out).data_ptr(),
            num_threads or torch.get_num_threads(),
        )
        return torch.tensor(length)

    def decode(self, buffer: Tensor, values: Tensor) -> Tensor:
        return decode_by(_kernels.decode_difference, buffer, values)


def decode_by(kernel: Callable[..., bool], buffer: Tensor, values: Tensor) -> Tensor:
    """Change ``values`` by the bytes of ``buffer``. Returns whether they are good."""
    is_good = kernel(
        active_isa(),
        values.element_size(),
        on_host(buffer).data_ptr(),
        buffer.numel(),
        on_host(values).data_ptr(),
        values.numel(),
        torch.get_num_threads(),
    )
    return torch.tensor(is_good)


CODEC: Final = NativeCodec()
