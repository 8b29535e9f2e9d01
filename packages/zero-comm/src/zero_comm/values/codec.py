"""Lossless coding of tensors: codecs, the choice of one for a device, and checked functions.

See [Note: the value buffer] in `zero_comm.values.value_format`. Backends are those of
`zero_comm.quantizer.backend`, and ``ZERO_COMM_BACKEND`` forces one here too.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from zero_comm.differences.codec import check_itemsize, flat
from zero_comm.quantizer.backend import find_backend_name
from zero_comm.values.torch_codec import TorchCodec
from zero_comm.values.value_format import max_values_nbytes


class ValueCodec(Protocol):
    """Encodes and decodes values. Callers check arguments.

    Tensors are flat, contiguous, of one device, and don't overlap. Elements have 2 or 4 bytes.
    """

    @property
    def name(self) -> str:
        """Name in ``ZERO_COMM_BACKEND``."""

    def encode(self, values: Tensor, out: Tensor) -> Tensor:
        """Code ``values``, and return how many bytes were written: int64, 0-dim, on their device.

        ``out`` is uint8, `max_values_nbytes` long, at an even address, undefined past the result.
        """

    def decode(self, buffer: Tensor, values: Tensor) -> Tensor:
        """Fill ``values`` from exactly the bytes that were written, at an even address.

        Return whether an encoder may have written them: bool, 0-dim, on the tensors' device. Where
        not, the values are undefined.
        """


def find_value_codec(device: torch.device) -> ValueCodec:
    """Return the codec for tensors on ``device``. Raises the errors of `zero_comm.backend`."""
    return _load(find_backend_name(device))


def encode_values(values: Tensor) -> Tensor:
    """Code a tensor so that no bit is lost: gradients take about 11 of the 16 bits of bfloat16.

    16 bits and 32 bits of any dtype; NaN, signed zeros and denormals are kept as they are. See
    [Note: the value buffer] for the bytes. At most ``2 / 256`` bytes per element are added to the
    elements' own.

    Args:
        values: any shape.

    Returns:
        The bytes: uint8, 1-D, on the tensor's device.

    Raises:
        ValueError: elements have neither 2 nor 4 bytes.
    """
    check_itemsize("values", values)
    values = flat(values.detach().contiguous())
    nbytes = max_values_nbytes(values.numel(), values.element_size())
    out = torch.empty(nbytes, dtype=torch.uint8, device=values.device)
    length = find_value_codec(values.device).encode(values, out)
    return out[: int(length)].clone()


def decode_values(buffer: Tensor, values: Tensor) -> None:
    """Fill ``values`` with what `encode_values` coded.

    Args:
        buffer: uint8, 1-D, on the device of ``values``.
        values: contiguous, of the number and size of elements that were coded; overwritten.

    Raises:
        ValueError: an argument that doesn't fit, or bytes that `encode_values` did not make for
            such a tensor; ``values`` are undefined then.
    """
    check_itemsize("values", values)
    if not values.is_contiguous():
        raise ValueError(f"values must be contiguous, got strides {values.stride()}")
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or buffer.device != values.device:
        raise ValueError(
            f"buffer must be 1-D uint8 on {values.device}, got {buffer.dtype} of "
            f"{list(buffer.shape)} on {buffer.device}"
        )
    aligned = buffer if buffer.data_ptr() % 2 == 0 else buffer.clone()
    if not find_value_codec(values.device).decode(aligned.contiguous(), flat(values.detach())):
        raise ValueError(
            f"buffer is damaged, or of another tensor: its {buffer.numel()} bytes do not code "
            f"{values.numel()} elements of {values.dtype}"
        )


@cache
def _load(name: str) -> ValueCodec:
    if name == "torch":
        return TorchCodec()
    loaded: ValueCodec = import_module(f"zero_comm.values.{name}_codec").CODEC
    return loaded
